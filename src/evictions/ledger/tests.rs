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

fn empty(budgets: Budgets) -> EvictionLedger {
    EvictionLedger::resume(
        budgets,
        EvictionRecord::default(),
        &FirstSeen::default(),
        at(0),
    )
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

fn base_victim() -> Victim {
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
    let changes: [(BudgetScope, Change); 4] = [
        (BudgetScope::Zone, |it| it.zone = Some("y".to_owned())),
        (BudgetScope::Node, |it| it.node = "other".to_owned()),
        (BudgetScope::Namespace, |it| {
            it.namespace = "other".to_owned();
        }),
        (BudgetScope::Owner, |it| it.owner = None),
    ];
    let of = |scope: BudgetScope| {
        let mut budgets = generous();
        match scope {
            BudgetScope::Fleet => budgets.fleet.evictions = 1,
            BudgetScope::Zone => budgets.zone.evictions = 1,
            BudgetScope::Node => budgets.node.evictions = 1,
            BudgetScope::Namespace => budgets.namespace.evictions = 1,
            BudgetScope::Owner => budgets.owner.evictions = 1,
        }
        let mut ledger = empty(budgets);
        assert_eq!(ledger.reserve(base_victim(), at(0)), Ok(Granted::New));
        ledger
    };
    let second = || Victim {
        uid: "second".to_owned(),
        ..base_victim()
    };
    for scope in BudgetScope::ALL {
        let exhausted = of(scope).reserve(second(), at(0)).unwrap_err();
        assert!(matches!(exhausted.limit, Limit::Budget(by, _) if by == scope));
    }
    for (scope, change) in changes {
        let mut other = second();
        change(&mut other);
        assert_eq!(
            of(scope).reserve(other, at(0)),
            Ok(Granted::New),
            "{scope:?}"
        );
    }
    // The same owner name in another namespace is a different owner.
    let mut elsewhere = second();
    elsewhere.namespace = "other".to_owned();
    assert_eq!(
        of(BudgetScope::Owner).reserve(elsewhere, at(0)),
        Ok(Granted::New)
    );
}

#[test]
fn a_reservation_is_returned_only_by_a_poll_after_its_timeout() {
    let mut ledger = empty(Budgets {
        fleet: budget(1, 60),
        ..generous()
    });
    assert_eq!(ledger.reserve(victim(1), at(0)), Ok(Granted::New));
    assert_eq!(
        ledger.observe("u1", PodState::Running, at(29), at(31)),
        None
    );
    assert!(
        ledger.reserve(victim(2), at(31)).is_err(),
        "the poll was too early"
    );
    assert_eq!(ledger.reserve(victim(1), at(32)), Ok(Granted::Existing));
    assert_eq!(
        ledger.observe("u1", PodState::Running, at(61), at(61)),
        None
    );
    let settled = ledger.observe("u1", PodState::Running, at(62), at(63));
    assert_eq!(settled, Some(Settled::Returned));
    assert_eq!(ledger.reserve(victim(2), at(63)), Ok(Granted::New));
}

#[test]
fn the_api_servers_answer_settles_a_reservation_at_once() {
    let mut ledger = empty(Budgets {
        fleet: budget(1, 60),
        ..generous()
    });
    assert_eq!(ledger.reserve(victim(1), at(0)), Ok(Granted::New));
    assert!(ledger.settle("u1", Settled::Returned, at(0)));
    assert_eq!(ledger.reserve(victim(2), at(0)), Ok(Granted::New));
    assert!(ledger.settle("u2", Settled::Confirmed, at(1)));
    assert!(
        !ledger.settle("u2", Settled::Returned, at(2)),
        "a confirmed eviction stays confirmed"
    );
    assert!(ledger.reserve(victim(3), at(60)).is_err());
    assert_eq!(ledger.observe("u2", PodState::Gone, at(3), at(3)), None);
    assert_eq!(ledger.reserve(victim(3), at(61)), Ok(Granted::New));
    assert!(!ledger.settle("u9", Settled::Confirmed, at(61)), "unknown");
}

#[test]
fn an_eviction_counts_for_its_window_and_while_the_pod_terminates() {
    let mut ledger = empty(Budgets {
        fleet: budget(1, 60),
        ..generous()
    });
    assert_eq!(ledger.reserve(victim(1), at(0)), Ok(Granted::New));
    let settled = ledger.observe("u1", PodState::Terminating, at(4), at(5));
    assert_eq!(settled, Some(Settled::Confirmed));
    let exhausted = ledger.reserve(victim(2), at(20)).unwrap_err();
    assert_eq!(exhausted.retry_after, Duration::from_secs(45));
    assert!(
        ledger.reserve(victim(2), at(100)).is_err(),
        "it is still terminating"
    );
    let mut lingers = ledger.clone();
    assert_eq!(ledger.observe("u1", PodState::Gone, at(100), at(101)), None);
    assert_eq!(ledger.reserve(victim(2), at(101)), Ok(Granted::New));
    // A pod that never finishes terminating must not block all others forever.
    assert!(lingers.reserve(victim(2), at(604)).is_err());
    assert_eq!(lingers.reserve(victim(2), at(605)), Ok(Granted::New));
    lingers.prune(at(4000));
    assert!(!lingers.contains("u1"));
}

#[test]
fn an_unknown_history_blocks_evictions_for_the_longest_window() {
    let budgets = Budgets {
        owner: budget(100, 300),
        ..generous()
    };
    let mut ledger = empty(budgets).close(at(0));
    let exhausted = ledger.reserve(victim(1), at(200)).unwrap_err();
    assert_eq!(exhausted.limit, Limit::UnknownHistory);
    assert_eq!(exhausted.retry_after, Duration::from_secs(100));
    // The next leader knows no more than this one.
    let resumed = |ledger: &EvictionLedger, now| {
        EvictionLedger::resume(budgets, ledger.record(1, now), &FirstSeen::default(), now)
    };
    assert!(
        resumed(&ledger, at(200))
            .reserve(victim(1), at(400))
            .is_err()
    );
    assert_eq!(ledger.reserve(victim(1), at(300)), Ok(Granted::New));
    assert!(
        resumed(&ledger, at(300))
            .reserve(victim(2), at(300))
            .is_ok()
    );
}

#[test]
fn a_budget_of_zero_allows_no_eviction() {
    let mut ledger = empty(Budgets {
        node: budget(0, 60),
        ..generous()
    });
    let exhausted = ledger.reserve(victim(1), at(0)).unwrap_err();
    assert_eq!(
        (exhausted.limit, exhausted.retry_after),
        (Limit::Budget(BudgetScope::Node, budget(0, 60)), MAX_WAIT)
    );
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
        assert_eq!(ledger.reserve(victim(number), at(0)), Ok(Granted::New));
    }
    let exhausted = ledger.reserve(victim(9999), at(0)).unwrap_err();
    assert_eq!(exhausted.limit, Limit::FullRecord);
    assert!(ledger.record(1, at(0)).write().len() < 900 << 10);
}

#[test]
fn pods_are_polled_until_they_are_gone() {
    let mut ledger = empty(generous());
    assert_eq!(ledger.reserve(victim(1), at(0)), Ok(Granted::New));
    let due = |ledger: &mut EvictionLedger, seconds| ledger.due_for_poll(at(seconds), 9).len();
    assert_eq!([due(&mut ledger, 1), due(&mut ledger, 2)], [0, 1]);
    assert_eq!(due(&mut ledger, 3), 0, "it was just polled");
    ledger.observe("u1", PodState::Terminating, at(4), at(4));
    assert_eq!([due(&mut ledger, 5), due(&mut ledger, 14)], [0, 1]);
    ledger.observe("u1", PodState::Gone, at(14), at(14));
    assert_eq!(due(&mut ledger, 99), 0);
}

#[test]
fn every_pod_is_polled_once_before_any_is_polled_twice() {
    let mut ledger = empty(generous());
    for number in 1..=5 {
        assert_eq!(ledger.reserve(victim(number), at(0)), Ok(Granted::New));
    }
    let mut polled: Vec<_> = (0..3)
        .flat_map(|turn| ledger.due_for_poll(at(2 + 2 * turn), 2))
        .map(|victim| victim.uid)
        .collect();
    assert_eq!(polled.len(), 6);
    polled.sort();
    polled.dedup();
    assert_eq!(polled.len(), 5);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Reserve(usize),
    /// The API server carries out an allowed eviction.
    Evict(usize),
    /// The pod finishes terminating.
    End(usize),
    /// A poll starts, its result arrives, or both at once.
    Poll(usize),
    Result(usize),
    PollNow(usize),
    /// The record is written after something was settled; the standby reads it.
    Write,
    Watch,
    Wait(u64),
    /// The standby takes over. `false`: it has never seen the record before.
    FailOver(bool),
}

/// Slots in which pods follow each other; few, so that much happens in each.
const SLOTS: usize = 7;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pod = || 0..SLOTS;
    let step = prop_oneof![
        6 => pod().prop_map(Step::Reserve),
        6 => pod().prop_map(Step::Evict),
        4 => pod().prop_map(Step::End),
        4 => pod().prop_map(Step::Poll),
        4 => pod().prop_map(Step::Result),
        4 => pod().prop_map(Step::PollNow),
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
    state: PodState,
    allowed: Option<BootTime>,
    poll: Option<(BootTime, PodState)>,
}

const NEW: Pod = Pod {
    state: PodState::Running,
    allowed: None,
    poll: None,
};

/// Leader, record, standby and pods.
struct Model {
    budgets: Budgets,
    now: BootTime,
    ledger: EvictionLedger,
    record: EvictionRecord,
    standby: FirstSeen,
    /// By slot: the last one exists, those before are gone.
    pods: Vec<Vec<Pod>>,
    /// When each pod started to terminate.
    evicted: Vec<(Victim, BootTime)>,
}

/// A pod of a slot, by its position there.
fn one_of(slot: usize, index: usize) -> Victim {
    Victim {
        uid: format!("u{slot}-{index}"),
        ..victim(slot)
    }
}

impl Model {
    fn new(budgets: Budgets) -> Self {
        Self {
            budgets,
            now: at(1000),
            ledger: empty(budgets),
            record: EvictionRecord::default(),
            standby: FirstSeen::default(),
            pods: vec![vec![NEW]; SLOTS],
            evicted: Vec::new(),
        }
    }

    fn write(&mut self) {
        self.record = self.ledger.record(1, self.now);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Reserve(slot) => self.reserve(slot),
            Step::Evict(slot) => self.evict(slot),
            Step::End(slot) => {
                let last = self.pods[slot].last_mut().unwrap();
                if last.state == PodState::Terminating {
                    last.state = PodState::Gone;
                    self.pods[slot].push(NEW);
                }
            }
            Step::Poll(slot) => {
                for pod in &mut self.pods[slot] {
                    pod.poll = Some((self.now, pod.state));
                }
            }
            Step::Result(slot) => self.poll_result(slot),
            Step::PollNow(slot) => {
                self.step(Step::Poll(slot));
                self.step(Step::Result(slot));
            }
            Step::Write => self.write(),
            Step::Watch => self.standby.update(&self.record, self.now),
            Step::Wait(seconds) => self.now = self.now + Duration::from_secs(seconds),
            Step::FailOver(knows) => self.fail_over(knows),
        }
    }

    fn reserve(&mut self, slot: usize) {
        self.ledger.prune(self.now);
        let index = self.pods[slot].len() - 1;
        let last = self.pods[slot].last().unwrap();
        let may = last.state == PodState::Running;
        if may && self.ledger.reserve(one_of(slot, index), self.now).is_ok() {
            self.write();
            self.pods[slot][index].allowed = Some(self.now);
        }
    }

    fn evict(&mut self, slot: usize) {
        let index = self.pods[slot].len() - 1;
        let last = self.pods[slot].last_mut().unwrap();
        let since = last.allowed.filter(|_| last.state == PodState::Running);
        if since.is_some_and(|since| self.now.since(since) < RESERVATION_TIMEOUT) {
            last.state = PodState::Terminating;
            self.evicted.push((one_of(slot, index), self.now));
        }
    }

    fn poll_result(&mut self, slot: usize) {
        for (index, pod) in self.pods[slot].iter_mut().enumerate() {
            if let Some((started, state)) = pod.poll.take() {
                let uid = one_of(slot, index).uid;
                self.ledger.observe(&uid, state, started, self.now);
            }
        }
    }

    fn fail_over(&mut self, knows: bool) {
        if !knows {
            self.standby = FirstSeen::default();
        }
        let record = self.record.clone();
        self.ledger = EvictionLedger::resume(self.budgets, record, &self.standby, self.now);
        // Polls of the previous leader are lost.
        for pod in self.pods.iter_mut().flatten() {
            pod.poll = None;
        }
    }

    /// The most pods that started to terminate within one budget window, among those that share the scope with any one
    /// of them.
    fn most(&self, scope: BudgetScope) -> usize {
        let window = self.budgets.of(scope).window;
        let of = |(first, from): &(Victim, BootTime)| {
            let beside = self.evicted.iter().filter(|(other, at)| {
                let shares =
                    first.uid == other.uid || first.budget_key().shares(scope, &other.budget_key());
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
        let mut model = Model::new(budgets);
        for step in steps {
            model.step(step);
            let changes = matches!(step, Step::Evict(_));
            for scope in BudgetScope::ALL.into_iter().filter(|_| changes) {
                let most = model.most(scope);
                let allowed = usize::from(budgets.of(scope).evictions);
                prop_assert!(most <= allowed, "{scope:?}: {most} of {allowed}");
            }
        }
        // Afterwards the budgets recover completely.
        for pod in 0..SLOTS {
            model.step(Step::End(pod));
        }
        for round in 0..3 {
            model.step(Step::Wait(61));
            for pod in 0..SLOTS {
                model.step(Step::PollNow(pod));
            }
            model.ledger.prune(model.now);
            prop_assert!(round < 2 || model.ledger.fleet(model.now) == 0, "{:?}", model.ledger);
        }
    }
}
