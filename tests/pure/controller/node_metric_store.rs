//! Guarantees to clients: versions never go back, a watch neither misses nor repeats events, pages belong to one list.

use std::collections::BTreeMap;
use std::sync::Arc;

use plimsoll::metrics_api::options::{ContinueToken, Filter};
use plimsoll::metrics_api::store::{
    EventKind, Freshness, Limits, NotLeading, ObjectContent, Store, StoredObject, Unavailable,
    Version,
};
use proptest::collection::vec;
use proptest::prelude::*;

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

fn content(value: u32) -> ObjectContent {
    ObjectContent {
        labels: Arc::new([("odd".to_owned(), (value % 2).to_string())].into()),
        metadata: r#""name":"x""#.into(),
        status: value.to_string().into(),
        cells: Vec::new(),
    }
}

/// An event of a replica or of the Lease.
#[derive(Clone, Debug)]
enum Step {
    Apply(usize, u32),
    Delete(usize),
    /// This replica wins the election, after this many other writes to etcd.
    Acquire(usize, u64),
    /// The leader renews its Lease: etcd advances.
    Renew,
    Follow(usize),
    /// The process restarts with the current objects.
    Crash(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..5_usize, 0..4_u32).prop_map(|(name, value)| Step::Apply(name, value)),
        2 => (0..5_usize).prop_map(Step::Delete),
        2 => (0..3_usize, 1..3_u64).prop_map(|(replica, writes)| Step::Acquire(replica, writes)),
        1 => Just(Step::Renew),
        1 => (0..3_usize).prop_map(Step::Follow),
        1 => (0..3_usize).prop_map(Step::Crash),
    ]
}

/// Three replicas with the same objects, one election, one etcd.
struct Cluster {
    revision: u64,
    objects: BTreeMap<&'static str, u32>,
    replicas: Vec<Store>,
    leader: Option<usize>,
}

impl Cluster {
    fn new(limits: Limits) -> Self {
        Self {
            revision: 7,
            objects: BTreeMap::new(),
            replicas: (0..3).map(|_| Store::new(limits)).collect(),
            leader: None,
        }
    }

    fn take(&mut self, step: &Step, limits: Limits) {
        match *step {
            Step::Apply(name, value) => {
                self.objects.insert(NAMES[name], value);
                let all = self.replicas.iter_mut();
                all.for_each(|store| store.apply(NAMES[name], content(value)));
            }
            Step::Delete(name) => {
                self.objects.remove(NAMES[name]);
                self.replicas
                    .iter_mut()
                    .for_each(|store| store.delete(NAMES[name]));
            }
            Step::Acquire(replica, writes) => {
                self.revision += writes;
                self.follow();
                self.replicas[replica].lead(self.revision);
                self.leader = Some(replica);
            }
            Step::Renew => self.revision += 1,
            Step::Follow(replica) if self.leader == Some(replica) => self.follow(),
            Step::Follow(_) => {}
            Step::Crash(replica) => {
                if self.leader == Some(replica) {
                    self.leader = None;
                }
                self.replicas[replica] = Store::new(limits);
                for (name, value) in &self.objects {
                    self.replicas[replica].apply(name, content(*value));
                }
            }
        }
    }

    fn follow(&mut self) {
        if let Some(leader) = self.leader.take() {
            self.replicas[leader].follow();
        }
    }

    fn leader(&self) -> Option<&Store> {
        self.leader.map(|leader| &self.replicas[leader])
    }
}

fn all(store: &Store) -> (Version, Vec<StoredObject>) {
    let page = store
        .list(&Filter::default(), Freshness::Any, None, None)
        .unwrap();
    assert!(page.next.is_none());
    (page.version, page.objects)
}

fn values(objects: &[StoredObject]) -> BTreeMap<String, String> {
    let pairs = objects
        .iter()
        .map(|object| (object.name.to_string(), object.content.status.to_string()));
    pairs.collect()
}

/// A client that lists once and then follows events, like informers.
#[derive(Default)]
struct Client {
    seen: BTreeMap<String, String>,
    version: Option<Version>,
    newest: Option<Version>,
}

impl Client {
    fn list(&mut self, store: &Store) {
        let (version, objects) = all(store);
        assert!(self.newest <= Some(version), "a list went back in time");
        self.newest = Some(version);
        self.version = Some(version);
        self.seen = values(&objects);
    }

    /// Continues with any leader; lists again only when required.
    fn follow(&mut self, store: &Store) {
        let Some(version) = self.version else {
            return self.list(store);
        };
        match store.events(version, usize::MAX) {
            Ok(events) => {
                for event in events {
                    let object = &event.object;
                    assert!(
                        Some(object.version) > self.newest,
                        "an event went back in time"
                    );
                    self.newest = Some(object.version);
                    self.version = Some(object.version);
                    let name = object.name.to_string();
                    let known = self.seen.contains_key(&name);
                    match event.kind {
                        EventKind::Added => assert!(!known, "{name} was added twice"),
                        _ => assert!(known, "{name} was never added"),
                    }
                    match event.kind {
                        EventKind::Deleted => drop(self.seen.remove(&name)),
                        _ => drop(self.seen.insert(name, object.content.status.to_string())),
                    }
                }
            }
            Err(Unavailable::Expired) => self.list(store),
            Err(other) => panic!("{other:?}"),
        }
    }
}

proptest! {
    #[test]
    fn a_client_never_goes_back_and_misses_nothing(
        steps in vec((step(), any::<bool>()), 1..120),
        events in 1..20_usize,
    ) {
        let limits = Limits { events, bytes: 1 << 20 };
        let mut cluster = Cluster::new(limits);
        let (mut eager, mut lazy) = (Client::default(), Client::default());
        for (step, looks) in &steps {
            cluster.take(step, limits);
            let Some(store) = cluster.leader() else { continue };
            eager.follow(store);
            if *looks {
                lazy.follow(store);
                prop_assert_eq!(&lazy.seen, &eager.seen);
            }
            let now: BTreeMap<String, String> =
                cluster.objects.iter().map(|(name, value)| ((*name).to_owned(), value.to_string())).collect();
            prop_assert_eq!(&eager.seen, &now);
        }
    }

    #[test]
    fn all_pages_show_the_list_at_the_first_page(
        before in vec(step(), 0..30),
        between in vec(vec(step(), 0..6), 5),
        limit in 1..3_usize,
    ) {
        let limits = Limits::default();
        let mut cluster = Cluster::new(limits);
        cluster.take(&Step::Acquire(0, 1), limits);
        let only_objects = |step: &&Step| matches!(step, Step::Apply(..) | Step::Delete(_));
        before.iter().filter(only_objects).for_each(|step| cluster.take(step, limits));
        let (version, wanted) = all(cluster.leader().unwrap());
        let mut found = Vec::new();
        let mut token: Option<ContinueToken> = None;
        let mut between = between.iter();
        loop {
            let store = cluster.leader().unwrap();
            let page = store.list(&Filter::default(), Freshness::Any, Some(limit), token.as_ref()).unwrap();
            prop_assert_eq!(page.version, version);
            found.extend(page.objects);
            let Some((next, more)) = page.next else { break };
            prop_assert_eq!(found.len() + more, wanted.len());
            token = Some(next);
            between.next().unwrap().iter().filter(only_objects).for_each(|step| cluster.take(step, limits));
        }
        prop_assert_eq!(&found, &wanted);
        let store = cluster.leader().unwrap();
        let again = store.list(&Filter::default(), Freshness::Exact(version), None, None).unwrap();
        prop_assert_eq!(&again.objects, &wanted);
    }

    #[test]
    fn the_ring_stays_within_its_limits(values in vec(0..1000_u32, 1..200), events in 1..50_usize) {
        let mut store = Store::new(Limits { events, bytes: 2000 });
        store.lead(1);
        let (first, _) = all(&store);
        for value in &values {
            store.apply("a", content(*value));
        }
        let (now, _) = all(&store);
        let number = |version: Version| version.to_string().parse::<u64>().unwrap();
        let known = |version: &u64| store.events(version.to_string().parse().unwrap(), 0).is_ok();
        let oldest = (number(first)..=number(now)).find(known).unwrap();
        prop_assert!(number(now) - oldest <= events as u64);
        // 2000 bytes hold few events, but the newest is always there.
        prop_assert!(number(now) - oldest <= 25);
    }
}

fn version(text: &str) -> Version {
    text.parse().unwrap()
}

#[test]
fn a_version_is_the_shifted_epoch_plus_a_sequence() {
    let mut store = Store::new(Limits::default());
    assert_eq!(store.version(), Err(NotLeading));
    store.apply("a", content(1));
    store.lead(5);
    assert_eq!(store.version().unwrap(), version("5242881"));
    store.apply("a", content(1));
    assert_eq!(
        store.version().unwrap(),
        version("5242881"),
        "nothing happened"
    );
    store.apply("a", content(2));
    assert_eq!(store.get("a").unwrap().unwrap().version, version("5242882"));
    store.delete("a");
    let events = store.events(version("5242881"), 10).unwrap();
    assert_eq!(events.len(), 2);
    // A deletion has its own version: clients continue from there.
    assert_eq!(events[1].kind, EventKind::Deleted);
    assert_eq!(events[1].object.version, version("5242883"));
    assert_eq!(
        events[1].before.as_ref().unwrap().version,
        version("5242882")
    );
}

#[test]
fn versions_that_were_never_issued_are_refused() {
    let mut store = Store::new(Limits::default());
    store.lead(5);
    store.apply("a", content(1));
    for text in ["1", "5242880", "5242883", "99999999999"] {
        assert_eq!(
            store.events(version(text), 10).unwrap_err(),
            Unavailable::Expired,
            "{text}"
        );
    }
    let future = Freshness::NotOlderThan(version("5242883"));
    let list = |freshness| {
        store
            .list(&Filter::default(), freshness, None, None)
            .map(|page| page.version)
    };
    assert_eq!(list(future), Err(Unavailable::Future(version("5242882"))));
    assert_eq!(
        list(Freshness::NotOlderThan(version("3"))),
        Ok(version("5242882"))
    );
    assert_eq!(
        list(Freshness::Exact(version("3"))),
        Err(Unavailable::Expired)
    );
    for text in ["", "0", "-1", "+1", "01", "1.0", "18446744073709551616"] {
        assert!(text.parse::<Version>().is_err(), "{text}");
    }
}

#[test]
fn versions_do_not_go_back_with_a_restored_etcd() {
    let mut store = Store::new(Limits::default());
    store.lead(5);
    store.apply("a", content(1));
    let before = store.version().unwrap();
    store.follow();
    assert_eq!(
        store.events(before, 1).unwrap_err(),
        Unavailable::NotLeading
    );
    store.lead(2);
    assert!(store.version().unwrap() > before);
    assert_eq!(store.events(before, 1).unwrap_err(), Unavailable::Expired);
}

#[test]
fn filters_select_by_label_and_name() {
    let mut store = Store::new(Limits::default());
    for (index, name) in NAMES.into_iter().enumerate() {
        store.apply(name, content(u32::try_from(index).unwrap()));
    }
    store.lead(1);
    let names = |query: &str| {
        let filter = plimsoll::metrics_api::options::Options::of(query)
            .unwrap()
            .filter;
        let page = store.list(&filter, Freshness::Any, Some(1), None).unwrap();
        let first = page.objects.first().map(|object| object.name.to_string());
        (first, page.next.map_or(0, |(_, more)| more))
    };
    assert_eq!(names("labelSelector=odd%3D1"), (Some("b".to_owned()), 1));
    assert_eq!(
        names("fieldSelector=metadata.name%3Dd"),
        (Some("d".to_owned()), 0)
    );
    assert_eq!(
        names("labelSelector=odd%3D1&fieldSelector=metadata.name%3Da"),
        (None, 0)
    );
    assert_eq!(names("labelSelector=%21odd"), (None, 0));
}
