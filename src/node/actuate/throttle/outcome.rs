//! Outcomes of throttling, for the log and the engine.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::engine::plan::Feedback;
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::engine::units::Quota;
use crate::node::cgroup::control_file::ControlFileError;
use crate::node::journal::JournalError;

/// One thing that was done or observed.
#[derive(Debug)]
pub enum ThrottleOutcome {
    /// A file now holds our value.
    Set {
        /// Which pod.
        uid: PodUid,
        /// Which file.
        file: PathBuf,
        /// The old value.
        from: Box<str>,
        /// The new value.
        to: Box<str>,
    },
    /// A file was restored or given up.
    Released {
        /// Which pod.
        uid: PodUid,
        /// Which file.
        file: PathBuf,
        /// Its final state.
        result: ReleaseResult,
    },
    /// Another writer changed a file of a throttled pod.
    Foreign {
        /// Which pod.
        uid: PodUid,
        /// Which file.
        file: PathBuf,
        /// The value they wrote.
        theirs: Box<str>,
    },
    /// Another writer reset every quota of ours to its original at once, as `systemctl daemon-reload` does.
    Swept {
        /// Which pods.
        uids: Vec<PodUid>,
    },
    /// Another writer gave a cgroup a new quota, which is the original from now on.
    Resized {
        /// Which pod.
        uid: PodUid,
        /// The cgroup below the pod's.
        cgroup: Arc<str>,
        /// The new original.
        original: Quota,
    },
    /// Another writer keeps changing the pod's files, so it is left alone for a while.
    Contested {
        /// Which pod.
        uid: PodUid,
        /// When it may be throttled again.
        until: BootTime,
    },
    /// The throttle reached its deadline without being asked for again.
    Expired {
        /// Which pod.
        uid: PodUid,
    },
    /// This kernel has no burst; reported once.
    NoBurst,
    /// The pod's cgroup no longer exists.
    Gone {
        /// Which pod.
        uid: PodUid,
    },
    /// A file could not be read or written.
    Failed {
        /// Which pod.
        uid: PodUid,
        /// It failed while throttling; otherwise while restoring, which is retried.
        throttling: bool,
        /// Why.
        error: ControlFileError,
    },
    /// The journal cannot be written: nothing new is throttled, restores still run.
    JournalFailed {
        /// Why.
        error: JournalError,
    },
    /// The pod was not changed because the journal cannot be written.
    NotThrottled {
        /// Which pod.
        uid: PodUid,
    },
}

/// The final state of a file that was released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReleaseResult {
    /// The original was written back.
    Restored(Box<str>),
    /// It already held the original.
    Original(Box<str>),
    /// It held another writer's value, which stays.
    Left(Box<str>),
    /// The kernel no longer accepts the original, since another writer set a quota smaller than this burst.
    Impossible(Box<str>),
    /// The cgroup no longer exists.
    Gone,
}

impl fmt::Display for ReleaseResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Restored(original) => write!(f, "restored to `{original}`"),
            Self::Original(original) => write!(f, "holds its original `{original}`"),
            Self::Left(theirs) => write!(f, "left at `{theirs}`, which another writer set"),
            Self::Impossible(original) => {
                write!(f, "the kernel no longer accepts its original `{original}`")
            }
            Self::Gone => f.write_str("gone with its cgroup"),
        }
    }
}

impl ThrottleOutcome {
    /// Feedback for the engine before its next step.
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
            Self::Foreign { uid, .. } => Some(Feedback::Overwritten {
                uids: vec![uid.clone()],
            }),
            Self::Swept { uids } => Some(Feedback::Overwritten { uids: uids.clone() }),
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

impl fmt::Display for ThrottleOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Set { file, from, to, .. } => {
                write!(f, "{}: `{from}` -> `{to}`", file.display())
            }
            Self::Released { file, result, .. } => write!(f, "{}: {result}", file.display()),
            Self::Foreign { file, theirs, .. } => {
                write!(f, "{}: another writer set it to `{theirs}`", file.display())
            }
            Self::Swept { uids } => write!(
                f,
                "another writer reset every throttled quota, as a daemon-reload does: throttled again (pods: {})",
                uids.len()
            ),
            Self::Resized {
                uid,
                cgroup,
                original,
            } => write!(f, "pod {uid} {cgroup}: its quota is {original} from now on"),
            Self::Contested { uid, .. } => {
                write!(
                    f,
                    "pod {uid}: another writer keeps changing its files, left alone for now"
                )
            }
            Self::NoBurst => f.write_str(
                "this kernel has no CPU burst (Linux 5.14 and later have it): `burstQuota` has no effect",
            ),
            Self::Expired { uid } => write!(f, "pod {uid}: its throttle has expired"),
            Self::Gone { uid } => write!(f, "pod {uid}: gone"),
            Self::Failed { uid, error, .. } => write!(f, "pod {uid}: {error}"),
            Self::JournalFailed { error } => error.fmt(f),
            Self::NotThrottled { uid } => {
                write!(
                    f,
                    "pod {uid}: not changed, since the journal cannot be written"
                )
            }
        }
    }
}
