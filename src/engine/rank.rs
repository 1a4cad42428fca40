//! The order in which victims are acted on.

use std::cmp::Ordering;

use super::pod::Pod;

/// Compares two candidates, each with its usage of the resource. `Less` is acted on first: elastic users, lower priority,
/// `BestEffort` before `Burstable` before `Guaranteed`, higher usage, younger, name. Namespace and UID break ties.
pub fn compare((a, a_uses): (&Pod, u64), (b, b_uses): (&Pod, u64)) -> Ordering {
    b.elastic
        .cmp(&a.elastic)
        .then(a.priority.cmp(&b.priority))
        .then(a.qos.cmp(&b.qos))
        .then(b_uses.cmp(&a_uses))
        .then(b.started.cmp(&a.started))
        .then_with(|| a.name.cmp(&b.name))
        .then_with(|| a.namespace.cmp(&b.namespace))
        .then_with(|| a.uid.cmp(&b.uid))
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use proptest::prelude::*;

    use super::super::pod::{PodUid, QosClass};
    use super::super::testing::pod;
    use super::*;

    type Candidate = (Pod, u64);

    fn order(a: &Candidate, b: &Candidate) -> Ordering {
        compare((&a.0, a.1), (&b.0, b.1))
    }

    /// Each criterion decides even if all later criteria say the opposite.
    #[test]
    fn each_criterion_takes_precedence_over_later_ones() {
        let changes: [fn(&mut Candidate, bool); 6] = [
            |c, first| c.0.elastic = first,
            |c, first| c.0.priority = if first { -1 } else { 1 },
            |c, first| {
                c.0.qos = if first {
                    QosClass::BestEffort
                } else {
                    QosClass::Guaranteed
                }
            },
            |c, first| c.1 = if first { 9 } else { 1 },
            |c, first| c.0.started = if first { 9 } else { 1 },
            |c, first| c.0.name = if first { "a" } else { "b" }.to_owned(),
        ];
        for criterion in 0..changes.len() {
            let (mut first, mut second) = ((pod("x"), 5), (pod("y"), 5));
            changes[criterion](&mut first, true);
            changes[criterion](&mut second, false);
            for later in &changes[criterion + 1..] {
                later(&mut first, false);
                later(&mut second, true);
            }
            assert_eq!(order(&first, &second), Ordering::Less, "{criterion}");
            assert_eq!(order(&second, &first), Ordering::Greater, "{criterion}");
        }
    }

    #[test]
    fn qos_classes_are_ordered_best_effort_burstable_guaranteed() {
        let of = |qos| (Pod { qos, ..pod("x") }, 0);
        let classes = [
            QosClass::BestEffort,
            QosClass::Burstable,
            QosClass::Guaranteed,
        ];
        assert!(classes.map(of).is_sorted_by(|a, b| order(a, b).is_lt()));
    }

    fn candidate() -> impl Strategy<Value = Candidate> {
        let small = 0..2_i32;
        (
            any::<bool>(),
            small.clone(),
            small,
            0..2_u64,
            0..2_i64,
            0..3_u8,
        )
            .prop_map(|(elastic, priority, qos, uses, started, uid)| {
                let mut pod = pod("same name");
                pod.uid = PodUid::from(format!("{uid}").as_str());
                pod.elastic = elastic;
                pod.priority = priority;
                pod.started = started;
                if qos == 1 {
                    pod.qos = QosClass::Burstable;
                }
                (pod, uses)
            })
    }

    proptest! {
        #[test]
        fn the_order_is_total(a in candidate(), b in candidate(), c in candidate()) {
            prop_assert_eq!(order(&a, &b), order(&b, &a).reverse());
            prop_assert_eq!(order(&a, &b) == Ordering::Equal, a == b);
            if order(&a, &b).is_le() && order(&b, &c).is_le() {
                prop_assert!(order(&a, &c).is_le());
            }
        }
    }
}
