use super::*;
use crate::engine::selector::Requirement;

fn options(query: &str) -> Options {
    Options::of(query).unwrap()
}

fn refused(query: &str) -> (u16, String) {
    let refusal = Options::of(query).unwrap_err();
    (refusal.code, refusal.message)
}

#[test]
fn selectors_are_read_as_kubectl_writes_them() {
    let filter = options("labelSelector=app%3Dweb%2Ctier+in+%28a%2C+b%29%2C%21old%2Czone%21%3Dz%2Cgpu%2Cos+notin+%28w%29").filter;
    let text = |text: &str| text.to_owned();
    let wanted = [
        Requirement::In(text("app"), vec![text("web")]),
        Requirement::In(text("tier"), vec![text("a"), text("b")]),
        Requirement::NotIn(text("os"), vec![text("w")]),
        Requirement::NotIn(text("zone"), vec![text("z")]),
        Requirement::Exists(text("gpu")),
        Requirement::DoesNotExist(text("old")),
    ];
    assert_eq!(filter.labels.requirements, wanted);
    let named = options("fieldSelector=metadata.name%3Dn1").filter;
    let wanted = Filter {
        names: vec![(text("n1"), true)],
        ..Filter::default()
    };
    assert_eq!(named, wanted);
    let not = options("fieldSelector=metadata.name!=n1,metadata.name==n2").filter;
    assert_eq!(not.names, [(text("n1"), false), (text("n2"), true)]);
    assert_eq!(not.only(), Some("n2"));
    assert!(options("labelSelector=&fieldSelector=").filter.is_all());
}

#[test]
fn an_invalid_selector_is_refused_with_an_explanation() {
    for query in [
        "labelSelector=a+b",
        "labelSelector=a+in+b",
        "labelSelector=a%3E1",
        "labelSelector=%C3%A4",
    ] {
        let (code, message) = refused(query);
        assert_eq!(code, 400, "{query}");
        assert!(message.contains("write key=value"), "{message}");
    }
    let (code, message) = refused("fieldSelector=spec.nodeName%3Dn1");
    assert_eq!(code, 400);
    assert_eq!(
        message,
        "field label not supported: spec.nodeName; only metadata.name is"
    );
}

#[test]
fn conflicting_parameters_are_refused_so_that_clients_fall_back() {
    for query in [
        "sendInitialEvents=true&resourceVersionMatch=NotOlderThan",
        "resourceVersionMatch=Exact",
        "resourceVersionMatch=Exact&resourceVersion=0",
        "resourceVersionMatch=Newest&resourceVersion=5",
        "resourceVersionMatch=NotOlderThan&resourceVersion=5&continue=5.a",
        "watch=true&sendInitialEvents=true",
        "watch=true&resourceVersionMatch=NotOlderThan&resourceVersion=5",
        "watch=true&sendInitialEvents=true&resourceVersionMatch=Exact&resourceVersion=5",
    ] {
        assert_eq!(refused(query).0, 422, "{query}");
    }
    for query in [
        "resourceVersion=abc",
        "resourceVersion=-1",
        "resourceVersion=007",
        "limit=x",
        "continue=x",
        "watch=1&timeoutSeconds=x",
    ] {
        assert_eq!(refused(query).0, 400, "{query}");
    }
}

#[test]
fn a_watch_starts_with_all_objects_unless_it_has_a_version() {
    let watch = |query| match options(query).operation {
        ListOrWatch::Watch(watch) => watch,
        ListOrWatch::List(list) => panic!("{list:?}"),
    };
    assert_eq!(watch("watch=1").since, Since::Initial(None));
    assert_eq!(
        watch("watch=true&resourceVersion=0").since,
        Since::Initial(None)
    );
    let without_initial_events =
        "watch=true&sendInitialEvents=false&resourceVersionMatch=NotOlderThan";
    assert_eq!(watch(without_initial_events).since, Since::Now);
    let since = Since::Version("77".parse().unwrap());
    assert_eq!(watch("watch=true&resourceVersion=77").since, since);
    let streamed = watch(
        "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&resourceVersion=0&timeoutSeconds=9",
    );
    assert!(streamed.marks_initial && streamed.bookmarks);
    assert_eq!(streamed.timeout, Some(Duration::from_secs(9)));
    assert_eq!(streamed.since, Since::Initial(None));
}

#[test]
fn a_token_survives_a_round_trip() {
    let token = ContinueToken {
        version: "123".parse().unwrap(),
        start: "worker-1.example.com".to_owned(),
    };
    let ListOrWatch::List(list) = options(&format!("limit=5&continue={}", token.text())).operation
    else {
        panic!("not a list");
    };
    assert_eq!(list.token, Some(token));
    assert_eq!(list.limit, Some(5));
}
