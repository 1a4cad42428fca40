//! What became of a throttle: for the log, and for the engine.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::engine::plan::Feedback;
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::engine::units::Quota;
use crate::node::cgroup::knob::KnobError;
use crate::node::journal::JournalError;

/// One thing that was done or seen.
#[derive(Debug)]
pub enum Outcome {
    /// A file holds our value now.
    Set {
        /// Which pod.
        uid: PodUid,
        /// Which file.
        file: PathBuf,
        /// What it held.
        from: Box<str>,
        /// What it holds.
        to: Box<str>,
    },
    /// A file is no longer ours.
    Released {
        /// Which pod.
        uid: PodUid,
        /// Which file.
        file: PathBuf,
        /// How it was left.
        fate: Fate,
    },
    /// Somebody else wrote a file of a throttled pod.
    Foreign {
        /// Which pod.
        uid: PodUid,
        /// Which file.
        file: PathBuf,
        /// What they wrote.
        theirs: Box<str>,
    },
    /// Somebody else put all throttled pods back to their originals at once, as `systemctl daemon-reload` does.
    Swept {
        /// How many pods.
        pods: usize,
    },
    /// Somebody else gave a cgroup a new quota: it is the original from now on.
    Resized {
        /// Which pod.
        uid: PodUid,
        /// The cgroup below the pod's.
        cgroup: Arc<str>,
        /// The new original.
        original: Quota,
    },
    /// Somebody else keeps writing the pod's files: it is left alone until then.
    Contested {
        /// Which pod.
        uid: PodUid,
        /// When it may be throttled again.
        until: BootTime,
    },
    /// Nobody asked for the throttle any more until its deadline.
    Expired {
        /// Which pod.
        uid: PodUid,
    },
    /// The pod's cgroup has vanished.
    Gone {
        /// Which pod.
        uid: PodUid,
    },
    /// A file could not be read or written.
    Failed {
        /// Which pod.
        uid: PodUid,
        /// Whether this was on the way down; otherwise it is tried again soon.
        throttling: bool,
        /// Why.
        error: KnobError,
    },
    /// The journal cannot be written: nothing new is throttled, restores still run.
    JournalFailed {
        /// Why.
        error: JournalError,
    },
    /// This pod stays as it is because of the journal.
    NotThrottled {
        /// Which pod.
        uid: PodUid,
    },
}

/// How a file was left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The original was written back.
    Restored(Box<str>),
    /// It held the original already.
    Original(Box<str>),
    /// It held somebody else's value, which stays.
    Left(Box<str>),
    /// The kernel no longer takes the original, since somebody else made the quota smaller than this burst.
    Impossible(Box<str>),
    /// The cgroup has vanished.
    Gone,
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Restored(original) => write!(f, "restored to `{original}`"),
            Self::Original(original) => write!(f, "holds its original `{original}`"),
            Self::Left(theirs) => write!(f, "left at `{theirs}`, which somebody else wrote"),
            Self::Impossible(original) => {
                write!(f, "the kernel no longer takes its original `{original}`")
            }
            Self::Gone => f.write_str("gone with its cgroup"),
        }
    }
}

impl Outcome {
    /// What the engine has to hear of it before the next step.
    pub fn feedback(&self) -> Option<Feedback> {
        match self {
            Self::Resized {
                uid,
                cgroup,
                original,
            } => Some(Feedback::Resized {
                uid: uid.clone(),
                cgroup: Arc::clone(cgroup),
                original: *original,
            }),
            Self::Contested { uid, until } => Some(Feedback::Contested {
                uid: uid.clone(),
                until: *until,
            }),
            Self::Gone { uid } => Some(Feedback::Gone { uid: uid.clone() }),
            Self::NotThrottled { uid }
            | Self::Failed {
                uid,
                throttling: true,
                ..
            } => Some(Feedback::ThrottleFailed { uid: uid.clone() }),
            _ => None,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Set { file, from, to, .. } => {
                write!(f, "{}: `{from}` -> `{to}`", file.display())
            }
            Self::Released { file, fate, .. } => write!(f, "{}: {fate}", file.display()),
            Self::Foreign { file, theirs, .. } => {
                write!(f, "{}: somebody else wrote `{theirs}`", file.display())
            }
            Self::Swept { pods } => write!(
                f,
                "somebody else put all {pods} throttled pods back at once: throttled again"
            ),
            Self::Resized {
                uid,
                cgroup,
                original,
            } => write!(f, "pod {uid} {cgroup}: its quota is {original} from now on"),
            Self::Contested { uid, .. } => {
                write!(
                    f,
                    "pod {uid}: somebody else keeps writing its files, left alone for now"
                )
            }
            Self::Expired { uid } => write!(f, "pod {uid}: its throttle has expired"),
            Self::Gone { uid } => write!(f, "pod {uid}: gone"),
            Self::Failed { uid, error, .. } => write!(f, "pod {uid}: {error}"),
            Self::JournalFailed { error } => error.fmt(f),
            Self::NotThrottled { uid } => {
                write!(
                    f,
                    "pod {uid}: left as it is, since the journal cannot be kept"
                )
            }
        }
    }
}
