//! Points from 0 to 10 for each candidate. Pure.

use super::super::values::median;
use super::in_flight::hash;

/// Points of the emptiest nodes, but for the first.
const MAX_POINTS: f64 = 9.0;

/// Fills in the lower median of the known values: a node without data is neither preferred nor starved. 0 if none is known.
pub fn neutral(values: &[Option<f64>]) -> Vec<f64> {
    let median = median(values.iter().flatten().copied().collect());
    values.iter().map(|value| value.unwrap_or(median)).collect()
}

/// The known candidate with the most headroom, if any has some. Of several, by a hash of the pod's UID and the node's name: pods
/// of a burst go to different ones, while the same pod gets the same answer from every replica and when it is asked for again.
pub fn first(headroom: &[Option<f64>], uid: &str, names: &[&str]) -> Option<usize> {
    let most = headroom.iter().flatten().copied().max_by(f64::total_cmp)?;
    if most <= 0.0 {
        return None;
    }
    let best = headroom.iter().enumerate();
    let best = best.filter(|(_, headroom)| **headroom == Some(most));
    let mut best = best.map(|(index, _)| index);
    let one = best.next()?;
    let Some(other) = best.next() else {
        return Some(one);
    };
    [one, other]
        .into_iter()
        .chain(best)
        .min_by_key(|index| hash(&[uid, names[*index]]))
}

/// The mean over pods of [`points`] for this headroom, but for the first.
pub fn mean_points(headroom: f64) -> f64 {
    headroom.clamp(0.0, 1.0) * MAX_POINTS
}

/// Points for this headroom, from 0 (hot) to 1 (idle): 0 to 9, and 1 more for the first, so that the scheduler takes it among its
/// equals, as the ledger of pods in flight assumes.
///
/// There are few points for many loads: the rounding threshold differs per pod, so that points are unbiased on average. It is the
/// same for all candidates, so that less headroom never gets more points.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it is from 0 to 9"
)]
pub fn points(headroom: &[f64], uid: &str, first: Option<usize>) -> Vec<u8> {
    let fraction = (hash(&[uid]) >> 11) as f64 / (1_u64 << 53) as f64;
    let points = |(index, headroom): (usize, &f64)| {
        let rounded = (headroom.clamp(0.0, 1.0) * MAX_POINTS + fraction).floor();
        let points = if *headroom > 0.0 { rounded as u8 } else { 0 };
        points.min(MAX_POINTS as u8) + u8::from(first == Some(index))
    };
    headroom.iter().enumerate().map(points).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_values_are_the_median() {
        let values = [Some(0.5), None, Some(0.1), Some(0.9), None];
        assert_eq!(neutral(&values), [0.5, 0.5, 0.1, 0.9, 0.5]);
        assert_eq!(neutral(&[None, None]), [0.0, 0.0]);
        assert!(neutral(&[]).is_empty());
    }

    #[test]
    fn the_first_has_the_most_headroom_and_ties_are_spread_by_pod() {
        let names = ["a", "b", "c"];
        assert_eq!(first(&[Some(0.1), None, Some(0.2)], "u", &names), Some(2));
        assert_eq!(first(&[Some(0.0), None, Some(0.0)], "u", &names), None);
        assert_eq!(first(&[None, None, None], "u", &names), None);
        let mut chosen = [0; 3];
        for pod in 0..300 {
            let uid = pod.to_string();
            let headroom = [Some(0.5); 3];
            let index = first(&headroom, &uid, &names).unwrap();
            assert_eq!(first(&headroom, &uid, &names), Some(index));
            chosen[index] += 1;
        }
        assert!(
            chosen.iter().all(|count| (70..130).contains(count)),
            "{chosen:?}"
        );
    }

    #[test]
    fn points_keep_the_mean_and_the_order() {
        let headroom = [-1.0, 0.0, 0.25, 0.26, 0.5, 1.0, 2.0];
        let mut sum = [0_u32; 7];
        for pod in 0..1000 {
            let points = points(&headroom, &pod.to_string(), Some(2));
            for (sum, points) in sum.iter_mut().zip(&points) {
                *sum += u32::from(*points);
            }
            assert_eq!((points[0], points[1], points[5], points[6]), (0, 0, 9, 9));
            // The third is the first.
            assert!(points[2] >= points[3], "{points:?}");
            assert!(points[3] <= points[4]);
        }
        // 0.25 of 9 is 2.25, and 1 for the first.
        assert!((3150..3350).contains(&sum[2]), "{sum:?}");
        assert!((4400..4600).contains(&sum[4]), "{sum:?}");
    }
}
