use futures::StreamExt;
use futures::stream::BoxStream;
use serde_json::{Value, json};
use tokio::sync::watch as channel;

use crate::cluster::election::{Leadership, Term};
use crate::metrics_api::options::{ListOrWatch, Options};
use crate::metrics_api::store::{Limits, ObjectContent};
use crate::metrics_api::table::Cell;

use super::*;

/// A replica that may lead.
struct Replica {
    data: Arc<Data>,
    leadership: channel::Sender<Leadership>,
}

impl Replica {
    fn leading(limits: Limits) -> Self {
        let (leadership, seen) = channel::channel(Leadership::default());
        let data = Arc::new(Data::new(limits, seen));
        let replica = Self { data, leadership };
        replica.lead(1, Duration::from_hours(1));
        replica
    }

    fn lead(&self, epoch: u64, duration: Duration) {
        let until = clock::boot_time() + duration;
        let term = Term { epoch, until };
        self.leadership
            .send_replace(Leadership::new(Some(term), None));
        self.data.change(|store| store.lead(epoch));
        self.data.notify_watches();
    }

    fn apply(&self, name: &str, pool: &str, value: u32) {
        let content = ObjectContent {
            labels: Arc::new([("pool".to_owned(), pool.to_owned())].into()),
            metadata: format!(r#""name":"{name}","labels":{{"pool":"{pool}"}}"#).into(),
            status: format!(r#"{{"pods":{value}}}"#).into(),
            cells: vec![Cell::Text(name.to_owned()), Cell::Number(value.into())],
        };
        self.data.change(|store| store.apply(name, content));
        self.data.notify_watches();
    }

    fn delete(&self, name: &str) {
        self.data.change(|store| store.delete(name));
        self.data.notify_watches();
    }

    fn watch(&self, query: &str, form: Form) -> BoxStream<'static, Bytes> {
        let options = Options::of(query).unwrap();
        let ListOrWatch::Watch(asked) = options.operation else {
            panic!("{query} is a list");
        };
        let writer = Encoder {
            form,
            include: options.include,
            now: clock::wall_time(),
        };
        let data = Arc::clone(&self.data);
        stream(data, asked, options.filter, writer).unwrap().boxed()
    }
}

/// Collects this number of events.
async fn events(watch: &mut BoxStream<'static, Bytes>, count: usize) -> Vec<Value> {
    let mut found = Vec::new();
    while found.len() < count {
        let part = tokio::time::timeout(Duration::from_secs(10), watch.next());
        let part = part.await.expect("an event in time").expect("an event");
        let text = String::from_utf8(part.to_vec()).unwrap();
        assert!(text.is_empty() || text.ends_with('\n'));
        found.extend(
            text.lines()
                .map(|line| serde_json::from_str::<Value>(line).unwrap()),
        );
    }
    assert_eq!(found.len(), count);
    found
}

/// Type, name and content, shortened.
fn short(event: &Value) -> String {
    let (object, kind) = (&event["object"], event["type"].as_str().unwrap());
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    format!("{kind} {name} {}", object["status"]["pods"])
}

async fn ended(watch: &mut BoxStream<'static, Bytes>) -> bool {
    let next = tokio::time::timeout(Duration::from_secs(10), watch.next());
    next.await.expect("it ends in time").is_none()
}

#[tokio::test]
async fn objects_are_added_and_deleted_as_they_match_the_filter() {
    let replica = Replica::leading(Limits::default());
    replica.apply("n1", "a", 1);
    replica.apply("n2", "b", 1);
    let mut watch = replica.watch("watch=1&labelSelector=pool%3Da", Form::Plain);
    assert_eq!(short(&events(&mut watch, 1).await[0]), "ADDED n1 1");
    replica.apply("n2", "b", 2);
    replica.apply("n1", "a", 3);
    replica.apply("n2", "a", 4);
    replica.apply("n1", "b", 5);
    replica.delete("n1");
    replica.delete("n2");
    let seen = events(&mut watch, 4).await;
    let lines: Vec<String> = seen.iter().map(short).collect();
    // A deleted object has its last matching content.
    assert_eq!(
        lines,
        [
            "MODIFIED n1 3",
            "ADDED n2 4",
            "DELETED n1 3",
            "DELETED n2 4"
        ]
    );
    let version = |event: &Value| {
        let text = event["object"]["metadata"]["resourceVersion"].as_str();
        text.unwrap().parse::<u64>().unwrap()
    };
    assert!(
        seen.is_sorted_by(|a, b| version(a) < version(b)),
        "{seen:#?}"
    );
}

#[tokio::test]
async fn a_watcher_that_lags_must_list_again() {
    let replica = Replica::leading(Limits {
        events: 3,
        ..Limits::default()
    });
    replica.apply("n1", "a", 0);
    let mut watch = replica.watch("watch=1", Form::Plain);
    events(&mut watch, 1).await;
    for value in 1..=4 {
        replica.apply("n1", "a", value);
    }
    let error = &events(&mut watch, 1).await[0];
    assert_eq!(error["type"], "ERROR");
    assert_eq!(
        (&error["object"]["code"], &error["object"]["reason"]),
        (&json!(410), &json!("Expired"))
    );
    assert!(ended(&mut watch).await);
}

#[tokio::test]
async fn a_watch_ends_with_leadership_and_expires_in_the_next_term() {
    let replica = Replica::leading(Limits::default());
    replica.apply("n1", "a", 1);
    let mut watch = replica.watch("watch=1", Form::Plain);
    events(&mut watch, 1).await;
    // Its deadline has passed without notice, as after a suspension of the process.
    replica.lead(1, Duration::ZERO);
    replica.apply("n1", "a", 2);
    assert!(ended(&mut watch).await);
    replica.lead(2, Duration::from_hours(1));
    let mut again = replica.watch("watch=1&resourceVersion=1048578", Form::Plain);
    assert_eq!(events(&mut again, 1).await[0]["object"]["code"], 410);
    assert!(ended(&mut again).await);
}

#[tokio::test]
async fn bookmarks_end_the_initial_objects_and_come_before_the_end() {
    let replica = Replica::leading(Limits::default());
    replica.apply("n1", "a", 1);
    let query = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=3";
    let mut watch = replica.watch(query, Form::Plain);
    let first = events(&mut watch, 2).await;
    assert_eq!(short(&first[0]), "ADDED n1 1");
    assert_eq!(first[1]["type"], "BOOKMARK");
    let bookmark = &first[1]["object"]["metadata"];
    assert_eq!(
        bookmark["annotations"],
        json!({"k8s.io/initial-events-end": "true"})
    );
    assert_eq!(
        bookmark["resourceVersion"],
        first[0]["object"]["metadata"]["resourceVersion"]
    );
    let last = &events(&mut watch, 1).await[0];
    assert_eq!(last["type"], "BOOKMARK");
    assert!(last["object"]["metadata"]["annotations"].is_null());
    assert!(ended(&mut watch).await);
}

#[tokio::test]
async fn a_table_defines_its_columns_only_once() {
    let replica = Replica::leading(Limits::default());
    replica.apply("n1", "a", 1);
    let mut watch = replica.watch("watch=1", Form::Table("meta.k8s.io/v1"));
    let first = &events(&mut watch, 1).await[0]["object"];
    assert_eq!(first["kind"], "Table");
    assert!(
        first["columnDefinitions"]
            .as_array()
            .is_some_and(|columns| columns.len() > 8)
    );
    assert_eq!(first["rows"][0]["cells"], json!(["n1", 1]));
    assert_eq!(first["rows"][0]["object"]["kind"], "PartialObjectMetadata");
    replica.apply("n1", "a", 2);
    let second = &events(&mut watch, 1).await[0]["object"];
    assert!(second["columnDefinitions"].is_null());
    assert_eq!(second["rows"][0]["cells"], json!(["n1", 2]));
}
