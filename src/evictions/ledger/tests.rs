use proptest::prelude::*;
use proptest::sample::select;

use super::*;

const fn budget(evictions: u16, seconds: u64) -> Budget {
    Budget {
        evictions,
        window: Duration::from_secs(seconds),
    }
}

fn at(seconds: u64) -> BootTime {
    BootTime::default() + Duration::from_secs(seconds)
}

fn generous() -> Budgets {
    Budgets {
        fleet: budget(100, 60),
        zone: budget(100, 60),
        node: budget(100, 60),
        namespace: budget(100, 60),
        owner: budget(100, 60),
    }
}

fn empty(budgets: Budgets) -> Ledger {
    Ledger::resume(budgets, Record::default(), &FirstSeen::default(), at(0))
}

/// Pods that differ in everything except what their numbers share.
fn victim(number: usize) -> Victim {
    Victim {
        uid: format!("u{number}"),
        namespace: format!("n{}", number % 3),
        name: format!("p{number}"),
        node: format!("node{}", number % 4),
        zone: (!number.is_multiple_of(4)).then(|| format!("z{}", number % 2)),
        owner: (!number.is_multiple_of(5)).then(|| format!("ReplicaSet/r{}", number % 2)),
    }
}

fn alike() -> Victim {
    Victim {
        uid: "first".to_owned(),
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
        node: "node".to_owned(),
        zone: Some("z".to_owned()),
        owner: Some("ReplicaSet/r".to_owned()),
    }
}

type Change = fn(&mut Victim);

#[test]
fn each_budget_counts_only_evictions_in_its_scope() {
    let changes: [(Scope, Change); 4] = [
        (Scope::Zone, |it| it.zone = Some("y".to_owned())),
        (Scope::Node, |it| it.node = "other".to_owned()),
        (Scope::Namespace, |it| it.namespace = "other".to_owned()),
        (Scope::Owner, |it| it.owner = None),
    ];
    let of = |scope: Scope| {
        let mut budgets = generous();
        match scope {
            Scope::Fleet => budgets.fleet.evictions = 1,
            Scope::Zone => budgets.zone.evictions = 1,
            Scope::Node => budgets.node.evictions = 1,
            Scope::Namespace => budgets.namespace.evictions = 1,
            Scope::Owner => budgets.owner.evictions = 1,
        }
        let mut ledger = empty(budgets);
        assert_eq!(ledger.ask(alike(), at(0)), Ok(Granted::New));
        ledger
    };
    let second = || Victim {
        uid: "second".to_owned(),
        ..alike()
    };
    for scope in Scope::ALL {
        let spent = of(scope).ask(second(), at(0)).unwrap_err();
        assert_eq!(spent.scope, scope);
    }
    for (scope, change) in changes {
        let mut other = second();
        change(&mut other);
        assert_eq!(of(scope).ask(other, at(0)), Ok(Granted::New), "{scope:?}");
    }
    // The same owner name in another namespace is a different owner.
    let mut elsewhere = second();
    elsewhere.namespace = "other".to_owned();
    assert_eq!(of(Scope::Owner).ask(elsewhere, at(0)), Ok(Granted::New));
}

#[test]
fn a_reservation_is_returned_only_by_a_poll_after_its_timeout() {
    let mut ledger = empty(Budgets {
        fleet: budget(1, 60),
        ..generous()
    });
    assert_eq!(ledger.ask(victim(1), at(0)), Ok(Granted::New));
    assert_eq!(ledger.look("u1", Seen::Running, at(29), at(31)), None);
    assert!(
        ledger.ask(victim(2), at(31)).is_err(),
        "the poll was too early"
    );
    assert_eq!(ledger.ask(victim(1), at(32)), Ok(Granted::Again));
    assert_eq!(ledger.look("u1", Seen::Running, at(61), at(61)), None);
    let settled = ledger.look("u1", Seen::Running, at(62), at(63));
    assert_eq!(settled, Some(Settled::Returned));
    assert_eq!(ledger.ask(victim(2), at(63)), Ok(Granted::New));
}

#[test]
fn the_api_servers_answer_settles_a_reservation_at_once() {
    let mut ledger = empty(Budgets {
        fleet: budget(1, 60),
        ..generous()
    });
    assert_eq!(ledger.ask(victim(1), at(0)), Ok(Granted::New));
    assert!(ledger.settle("u1", Settled::Returned, at(0)));
    assert_eq!(ledger.ask(victim(2), at(0)), Ok(Granted::New));
    assert!(ledger.settle("u2", Settled::Confirmed, at(1)));
    assert!(
        !ledger.settle("u2", Settled::Returned, at(2)),
        "a confirmed eviction stays confirmed"
    );
    assert!(ledger.ask(victim(3), at(60)).is_err());
    assert_eq!(ledger.look("u2", Seen::Gone, at(3), at(3)), None);
    assert_eq!(ledger.ask(victim(3), at(61)), Ok(Granted::New));
    assert!(!ledger.settle("u9", Settled::Confirmed, at(61)), "unknown");
}

#[test]
fn an_eviction_counts_for_its_window_and_while_the_pod_terminates() {
    let mut ledger = empty(Budgets {
        fleet: budget(1, 60),
        ..generous()
    });
    assert_eq!(ledger.ask(victim(1), at(0)), Ok(Granted::New));
    let settled = ledger.look("u1", Seen::Ending, at(4), at(5));
    assert_eq!(settled, Some(Settled::Confirmed));
    let spent = ledger.ask(victim(2), at(20)).unwrap_err();
    assert_eq!(spent.retry_after, Duration::from_secs(45));
    assert!(
        ledger.ask(victim(2), at(100)).is_err(),
        "it is still terminating"
    );
    let mut lingers = ledger.clone();
    assert_eq!(ledger.look("u1", Seen::Gone, at(100), at(101)), None);
    assert_eq!(ledger.ask(victim(2), at(101)), Ok(Granted::New));
    // A pod that never finishes terminating must not block all others forever.
    assert!(lingers.ask(victim(2), at(604)).is_err());
    assert_eq!(lingers.ask(victim(2), at(605)), Ok(Granted::New));
    lingers.forget(at(4000));
    assert!(!lingers.knows("u1"));
}

#[test]
fn an_unknown_history_blocks_evictions_for_the_longest_window() {
    let budgets = Budgets {
        owner: budget(100, 300),
        ..generous()
    };
    let mut ledger = empty(budgets).shut(at(0));
    let spent = ledger.ask(victim(1), at(200)).unwrap_err();
    assert_eq!(spent.retry_after, Duration::from_secs(100));
    // The next leader knows no more than this one.
    let resumed = |ledger: &Ledger, now| {
        Ledger::resume(budgets, ledger.record(1, now), &FirstSeen::default(), now)
    };
    assert!(resumed(&ledger, at(200)).ask(victim(1), at(400)).is_err());
    assert_eq!(ledger.ask(victim(1), at(300)), Ok(Granted::New));
    assert!(resumed(&ledger, at(300)).ask(victim(2), at(300)).is_ok());
}

#[test]
fn a_budget_of_zero_allows_no_eviction() {
    let mut ledger = empty(Budgets {
        node: budget(0, 60),
        ..generous()
    });
    let spent = ledger.ask(victim(1), at(0)).unwrap_err();
    assert_eq!((spent.scope, spent.retry_after), (Scope::Node, MAX_WAIT));
}

#[test]
fn the_ledger_never_outgrows_its_record() {
    let most = budget(MAX_EVICTIONS, 1);
    let mut ledger = empty(Budgets {
        fleet: most,
        zone: most,
        node: most,
        namespace: most,
        owner: budget(MAX_EVICTIONS, 3600),
    });
    for number in 0..usize::from(MAX_EVICTIONS) {
        assert_eq!(ledger.ask(victim(number), at(0)), Ok(Granted::New));
    }
    assert!(ledger.ask(victim(9999), at(0)).is_err());
    assert!(ledger.record(1, at(0)).write().len() < 900 << 10);
}

#[test]
fn pods_are_polled_until_they_are_gone() {
    let mut ledger = empty(generous());
    assert_eq!(ledger.ask(victim(1), at(0)), Ok(Granted::New));
    let due = |ledger: &mut Ledger, seconds| ledger.due(at(seconds), 9).len();
    assert_eq!([due(&mut ledger, 1), due(&mut ledger, 2)], [0, 1]);
    assert_eq!(due(&mut ledger, 3), 0, "it was just polled");
    ledger.look("u1", Seen::Ending, at(4), at(4));
    assert_eq!([due(&mut ledger, 5), due(&mut ledger, 14)], [0, 1]);
    ledger.look("u1", Seen::Gone, at(14), at(14));
    assert_eq!(due(&mut ledger, 99), 0);
}

#[test]
fn every_pod_is_polled_once_before_any_is_polled_twice() {
    let mut ledger = empty(generous());
    for number in 1..=5 {
        assert_eq!(ledger.ask(victim(number), at(0)), Ok(Granted::New));
    }
    let mut looked: Vec<_> = (0..3)
        .flat_map(|turn| ledger.due(at(2 + 2 * turn), 2))
        .map(|victim| victim.uid)
        .collect();
    assert_eq!(looked.len(), 6);
    ordered::sort(&mut looked);
    looked.dedup();
    assert_eq!(looked.len(), 5);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Ask(usize),
    /// The API server carries out an allowed eviction.
    Evict(usize),
    /// The pod finishes terminating.
    End(usize),
    /// A poll starts, its result arrives, or both at once.
    Look(usize),
    Hear(usize),
    See(usize),
    /// The record is written after something was settled; the standby reads it.
    Write,
    Watch,
    Wait(u64),
    /// The standby takes over. `false`: it has never seen the record before.
    FailOver(bool),
}

/// Slots in which pods follow each other; few, so that much happens in each.
const PLACES: usize = 7;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pod = || 0..PLACES;
    let step = prop_oneof![
        6 => pod().prop_map(Step::Ask),
        6 => pod().prop_map(Step::Evict),
        4 => pod().prop_map(Step::End),
        4 => pod().prop_map(Step::Look),
        4 => pod().prop_map(Step::Hear),
        4 => pod().prop_map(Step::See),
        2 => Just(Step::Write),
        2 => Just(Step::Watch),
        4 => select(vec![1, 2, 5, 9, 14, 29, 30, 61]).prop_map(Step::Wait),
        1 => any::<bool>().prop_map(Step::FailOver),
    ];
    proptest::collection::vec(step, 1..400)
}

/// One pod in a slot.
#[derive(Clone, Copy, Debug)]
struct Pod {
    seen: Seen,
    allowed: Option<BootTime>,
    look: Option<(BootTime, Seen)>,
}

const NEW: Pod = Pod {
    seen: Seen::Running,
    allowed: None,
    look: None,
};

/// Leader, record, standby and pods.
struct World {
    budgets: Budgets,
    now: BootTime,
    ledger: Ledger,
    record: Record,
    standby: FirstSeen,
    /// By slot: the last one exists, those before are gone.
    pods: Vec<Vec<Pod>>,
    /// When each pod started to terminate.
    evicted: Vec<(Victim, BootTime)>,
}

/// A pod of a slot, by its position there.
fn one_of(place: usize, index: usize) -> Victim {
    Victim {
        uid: format!("u{place}-{index}"),
        ..victim(place)
    }
}

impl World {
    fn new(budgets: Budgets) -> Self {
        Self {
            budgets,
            now: at(1000),
            ledger: empty(budgets),
            record: Record::default(),
            standby: FirstSeen::default(),
            pods: vec![vec![NEW]; PLACES],
            evicted: Vec::new(),
        }
    }

    fn write(&mut self) {
        self.record = self.ledger.record(1, self.now);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Ask(place) => self.ask(place),
            Step::Evict(place) => self.evict(place),
            Step::End(place) => {
                let last = self.pods[place].last_mut().unwrap();
                if last.seen == Seen::Ending {
                    last.seen = Seen::Gone;
                    self.pods[place].push(NEW);
                }
            }
            Step::Look(place) => {
                for pod in &mut self.pods[place] {
                    pod.look = Some((self.now, pod.seen));
                }
            }
            Step::Hear(place) => self.hear(place),
            Step::See(place) => {
                self.step(Step::Look(place));
                self.step(Step::Hear(place));
            }
            Step::Write => self.write(),
            Step::Watch => self.standby.take(&self.record, self.now),
            Step::Wait(seconds) => self.now = self.now + Duration::from_secs(seconds),
            Step::FailOver(knows) => self.fail_over(knows),
        }
    }

    fn ask(&mut self, place: usize) {
        self.ledger.forget(self.now);
        let index = self.pods[place].len() - 1;
        let last = self.pods[place].last().unwrap();
        let may = last.seen == Seen::Running;
        if may && self.ledger.ask(one_of(place, index), self.now).is_ok() {
            self.write();
            self.pods[place][index].allowed = Some(self.now);
        }
    }

    fn evict(&mut self, place: usize) {
        let index = self.pods[place].len() - 1;
        let last = self.pods[place].last_mut().unwrap();
        let since = last.allowed.filter(|_| last.seen == Seen::Running);
        if since.is_some_and(|since| self.now.since(since) < RESERVED) {
            last.seen = Seen::Ending;
            self.evicted.push((one_of(place, index), self.now));
        }
    }

    fn hear(&mut self, place: usize) {
        for (index, pod) in self.pods[place].iter_mut().enumerate() {
            if let Some((begun, seen)) = pod.look.take() {
                let uid = one_of(place, index).uid;
                self.ledger.look(&uid, seen, begun, self.now);
            }
        }
    }

    fn fail_over(&mut self, knows: bool) {
        if !knows {
            self.standby = FirstSeen::default();
        }
        let record = self.record.clone();
        self.ledger = Ledger::resume(self.budgets, record, &self.standby, self.now);
        // Polls of the previous leader are lost.
        for pod in self.pods.iter_mut().flatten() {
            pod.look = None;
        }
    }

    /// The most pods that started to terminate within one budget window, among those that share the scope with any one
    /// of them.
    fn most(&self, scope: Scope) -> usize {
        let window = self.budgets.of(scope).window;
        let of = |(first, from): &(Victim, BootTime)| {
            let beside = self.evicted.iter().filter(|(other, at)| {
                let shares = first.uid == other.uid || first.place().shares(scope, &other.place());
                shares && at >= from && at.since(*from) < window
            });
            beside.count()
        };
        self.evicted.iter().map(of).max().unwrap_or(0)
    }
}

proptest! {
    #[test]
    fn no_budget_is_exceeded_in_any_order_or_failover(
        steps in steps(),
        [fleet, zone, node, namespace, owner] in proptest::array::uniform5(1..4_u16),
        windows in proptest::array::uniform5(select(vec![10, 60, 90])),
    ) {
        let budgets = Budgets {
            fleet: budget(fleet, windows[0]),
            zone: budget(zone, windows[1]),
            node: budget(node, windows[2]),
            namespace: budget(namespace, windows[3]),
            owner: budget(owner, windows[4]),
        };
        let mut world = World::new(budgets);
        for step in steps {
            world.step(step);
            let changes = matches!(step, Step::Evict(_));
            for scope in Scope::ALL.into_iter().filter(|_| changes) {
                let most = world.most(scope);
                let allowed = usize::from(budgets.of(scope).evictions);
                prop_assert!(most <= allowed, "{scope:?}: {most} of {allowed}");
            }
        }
        // Afterwards the budgets recover completely.
        for pod in 0..PLACES {
            world.step(Step::End(pod));
        }
        for round in 0..3 {
            world.step(Step::Wait(61));
            for pod in 0..PLACES {
                world.step(Step::See(pod));
            }
            world.ledger.forget(world.now);
            prop_assert!(round < 2 || world.ledger.fleet(world.now) == 0, "{:?}", world.ledger);
        }
    }
}
