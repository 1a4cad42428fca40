//! What of the load counts for schedulers that read the label: loads up to 60 count alike. A rise of 10, a fall of 20, and
//! whatever reaches or leaves 95 are urgent. Pure.

use super::WantedSigns;
use super::schedule::Urgency;
use crate::crd::load_label::{FULL, LoadLabel};

/// In percent.
const URGENT_RISE: u8 = 10;
const URGENT_FALL: u8 = 20;

/// The label on a Node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnNode {
    Absent,
    Label(LoadLabel),
    /// Text that is not a valid value of the label.
    Invalid,
}

impl OnNode {
    fn of(text: Option<&str>) -> Self {
        let read = |text| LoadLabel::parse(text).map_or(Self::Invalid, Self::Label);
        text.map_or(Self::Absent, read)
    }
}

/// How much the label on the Node, as text, differs from what is wanted.
pub(super) fn change(text: Option<&str>, wants: &WantedSigns) -> Urgency {
    match difference(OnNode::of(text), wants.label()) {
        Urgency::Slow if wants.remove => Urgency::Urgent,
        change => change,
    }
}

fn difference(current: OnNode, wanted: Option<LoadLabel>) -> Urgency {
    let (current, wanted) = match (current, wanted) {
        (OnNode::Absent, None) => return Urgency::None,
        // A load that is unknown for a moment keeps its label.
        (OnNode::Label(_), None) => return Urgency::Slow,
        (OnNode::Absent | OnNode::Invalid, Some(wanted)) if wanted >= FULL => return Urgency::Full,
        (OnNode::Absent, Some(_)) | (OnNode::Invalid, _) => return Urgency::Urgent,
        (OnNode::Label(current), Some(wanted)) => (current, wanted),
    };
    if current.headroom() == wanted.headroom() {
        return Urgency::None;
    }
    if current < FULL && wanted >= FULL {
        return Urgency::Full;
    }
    let rises = wanted.percent().saturating_sub(current.percent()) >= URGENT_RISE;
    let falls = current.percent().saturating_sub(wanted.percent()) >= URGENT_FALL;
    let leaves_full = current >= FULL && wanted < FULL;
    if rises || falls || leaves_full {
        Urgency::Urgent
    } else {
        Urgency::Small
    }
}
