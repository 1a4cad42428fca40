//! HTTP requests and answers of agents, API servers and their clients.

use std::sync::{Arc, LazyLock};

use form_urlencoded::Serializer;
use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::crd::eviction::{EvictionAnswer, EvictionRequest};
use crate::crd::node_metric::{MAX_BREACHED, MAX_PODS, NodeMetric};
use crate::crd::report::{Acknowledgement, INTERVAL, MAX_INTERVAL, MissingReport, RelayedReport};
use crate::crd::{NodeMetricStatus, Report, Summary, summary as lease};
use crate::engine::selector::{Requirement, Selector};
use crate::metrics_api::authn::bearer;
use crate::metrics_api::compose::{self, NodeKnowledge, NodeKnown, Reachability, StaticFields};
use crate::metrics_api::encode::Encoder;
use crate::metrics_api::negotiate::{self, Form};
use crate::metrics_api::options::selector::{labels, names};
use crate::metrics_api::options::{Include, ListOrWatch, Options};
use crate::metrics_api::store::{Limits, Store, StoredObject};
use crate::metrics_api::table;

use super::tokens::TRUST;

/// The body of `POST /v1/report`.
pub fn report(bytes: &[u8]) {
    let Ok(report) = Report::parse(bytes) else {
        return;
    };
    let status = &report.status;
    assert!(status.top_pods.len() <= MAX_PODS && status.breached.len() <= MAX_BREACHED);
    assert!(status.conditions.is_empty());
    assert!(!report.interval().is_zero() && report.interval() <= MAX_INTERVAL);
    let text = serde_json::to_vec(&report).expect("a report has a JSON form");
    assert_eq!(Report::parse(&text).as_ref(), Ok(&report));
    check_answers(&report.status);
}

/// The body of `POST /v1/evict`, and the answer to it that an agent reads.
pub fn eviction(bytes: &[u8]) {
    if let Ok(request) = EvictionRequest::parse(bytes) {
        let (key, target) = (&request.key, &request.target);
        let names = [&target.namespace, &target.name, &target.uid, &key.boot_id];
        for name in names {
            assert!(!name.is_empty() && !name.contains(['/', '%', '?', '#', ' ']));
        }
        let text = serde_json::to_vec(&request).expect("a request has a JSON form");
        assert_eq!(EvictionRequest::parse(&text).as_ref(), Ok(&request));
    }
    if let Ok(answer) = serde_json::from_slice::<EvictionAnswer>(bytes) {
        let text = serde_json::to_vec(&answer).expect("an answer has a JSON form");
        let again = serde_json::from_slice::<EvictionAnswer>(&text);
        assert_eq!(again.expect("an answer"), answer);
    }
}

/// Clients can read the answers that contain any report.
fn check_answers(status: &NodeMetricStatus) {
    let object = object(status.clone());
    assert_eq!(
        Some(object.content.cells.len()),
        table::columns().as_array().map(Vec::len)
    );
    let written = |form| -> Value {
        let writer = Encoder {
            form,
            include: Include::Object,
            now: Timestamp::UNIX_EPOCH,
        };
        serde_json::from_str(&writer.object(&object, true)).expect("answers are JSON")
    };
    written(Form::Table("meta.k8s.io/v1"));
    written(Form::Metadata);
    let plain: NodeMetric = serde_json::from_value(written(Form::Plain)).expect("a NodeMetric");
    let read = NodeMetricStatus {
        conditions: Vec::new(),
        ..plain.status
    };
    assert_eq!(read, *status);
}

fn object(status: NodeMetricStatus) -> StoredObject {
    let node = NodeKnown {
        uid: "uid".to_owned(),
        created: Some(Time(Timestamp::UNIX_EPOCH)),
        ..NodeKnown::default()
    };
    let fields = StaticFields::of("node", node).expect("a node has a JSON form");
    let known = NodeKnowledge {
        report: Some(Arc::new(status)),
        reported: Some(Timestamp::UNIX_EPOCH),
        health: Reachability::Reporting,
        ..NodeKnowledge::default()
    };
    let content = compose::content("node", &fields, &known).expect("a report has a JSON form");
    let mut store = Store::new(Limits::default());
    store.lead(1);
    store.apply("node", content);
    let found = store.get("node").expect("it leads");
    found.expect("the node's object")
}

/// Reports that replicas relay, and their answers to agents.
pub fn relay(bytes: &[u8]) {
    if let Ok(all) = serde_json::from_slice::<Vec<RelayedReport<&RawValue>>>(bytes) {
        for relayed in all {
            report(relayed.report.get().as_bytes());
        }
    }
    if let Ok(missed) = serde_json::from_slice::<Vec<MissingReport>>(bytes) {
        let text = serde_json::to_vec(&missed).expect("names have a JSON form");
        let read: Vec<MissingReport> = serde_json::from_slice(&text).expect("names");
        assert_eq!(read, missed);
    }
    if let Ok(answer) = serde_json::from_slice::<Acknowledgement>(bytes) {
        assert!((INTERVAL..=MAX_INTERVAL).contains(&answer.next_interval()));
    }
}

/// The query of a request: options of the API conventions with selectors; and selectors alone.
pub fn query(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    selectors(text);
    let Ok(options) = Options::of(text) else {
        return;
    };
    // Another encoding of the same query means the same.
    let pairs = form_urlencoded::parse(bytes);
    let again = Serializer::new(String::new()).extend_pairs(pairs).finish();
    assert_eq!(Options::of(&again).as_ref(), Ok(&options));
    if let ListOrWatch::List(list) = &options.operation
        && let Some(token) = &list.token
    {
        assert_ne!(list.limit, Some(0));
        let next = Serializer::new(String::new())
            .append_pair("continue", &token.text())
            .finish();
        let next = Options::of(&next).map(|options| options.operation);
        assert!(matches!(next, Ok(ListOrWatch::List(list)) if list.token.as_ref() == Some(token)));
    }
    let taken = options.filter.matches(&OBJECT);
    assert!(!(taken && options.filter.only().is_some_and(|name| name != "node")));
}

static OBJECT: LazyLock<StoredObject> = LazyLock::new(|| object(NodeMetricStatus::default()));

/// A selector reads the same from its plain form.
fn selectors(text: &str) {
    if let Ok(selector) = labels(text) {
        let plain: Vec<String> = selector.requirements.iter().map(plain).collect();
        assert_eq!(labels(&plain.join(",")).as_ref(), Ok(&selector));
        check_opposites(&selector);
    }
    if let Ok(found) = names(text) {
        let plain: Vec<String> = found
            .iter()
            .map(|(name, is)| format!("metadata.name{}{name}", if *is { "==" } else { "!=" }))
            .collect();
        assert_eq!(names(&plain.join(",")), Ok(found));
    }
}

fn plain(requirement: &Requirement) -> String {
    match requirement {
        Requirement::In(key, values) => format!("{key} in ({})", values.join(",")),
        Requirement::NotIn(key, values) => format!("{key} notin ({})", values.join(",")),
        Requirement::Exists(key) => key.clone(),
        Requirement::DoesNotExist(key) => format!("!{key}"),
    }
}

/// Exactly one of a requirement and its opposite matches.
fn check_opposites(selector: &Selector) {
    for requirement in &selector.requirements {
        let opposite = match requirement.clone() {
            Requirement::In(key, values) => Requirement::NotIn(key, values),
            Requirement::NotIn(key, values) => Requirement::In(key, values),
            Requirement::Exists(key) => Requirement::DoesNotExist(key),
            Requirement::DoesNotExist(key) => Requirement::Exists(key),
        };
        for labels in [&[][..], &[(requirement.key(), "a")]] {
            let [one, other] = [requirement, &opposite].map(|requirement| {
                let requirements = vec![requirement.clone()];
                Selector { requirements }.matches(labels)
            });
            assert_ne!(one, other, "{requirement:?} {labels:?}");
        }
    }
}

/// The `Accept` header.
pub fn accept(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let form = negotiate::form(text);
    // A client that accepts plain JSON gets an answer.
    assert!(!negotiate::accepts_json(text) || form.is_some());
    assert!(!negotiate::aggregated(text) || !text.trim().is_empty());
    assert!(negotiate::form(&format!("{text},application/json")).is_some());
}

/// Headers, as `name: value` lines: the user that a front proxy names, and a bearer token.
pub fn headers(bytes: &[u8]) {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            continue;
        };
        let name = HeaderName::from_bytes(&line[..colon]);
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii());
        // Requests with more headers are refused before.
        if let (Ok(name), Ok(value)) = (name, value)
            && headers.len() < 100
        {
            headers.append(name, value);
        }
    }
    let sent = |name: &str, wanted: &str| headers.get_all(name).iter().any(|it| it == wanted);
    if let Some(user) = TRUST.user(&headers) {
        assert!(!user.name.is_empty() && sent("x-remote-user", &user.name));
        assert!(
            user.groups
                .iter()
                .all(|group| sent("x-remote-group", group))
        );
        assert!(user.groups.is_sorted());
    }
    if let Some(token) = bearer(&headers) {
        assert!(!token.is_empty() && token.trim() == token);
    }
}

/// The annotation of an agent's Lease.
pub fn summary(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let written = Summary::parse(text).to_string();
    assert!(written.len() <= lease::MAX_BYTES);
    assert_eq!(Summary::parse(&written).to_string(), written);
}
