//! Whether an agent may evict a pod: of its own node, and within the cluster's budgets.
//!
//! API servers ask by a validating webhook on `pods/eviction`, which is matched to the agents' `ServiceAccount` alone.
//! [`ledger::Ledger`] decides, and does no I/O; [`books`] keeps it, and what outlives a leader.

mod books;
pub mod budget;
mod desk;
pub mod ledger;
mod metrics;
mod objects;
pub mod record;
mod review;
mod telling;

use futures::future::{BoxFuture, FutureExt};
use kube::Client;
use tokio::sync::{mpsc, watch};

use crate::cluster::election::Standing;
use books::{Books, Place, Shared};
use budget::Budgets;
use telling::Teller;

pub use desk::{Guard, Judged};
pub use metrics::GuardMetrics;

/// So many questions wait; one more is refused, and comes back later.
const MOST_WAITING: usize = 256;

/// How evictions are guarded.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name of the agents' `ServiceAccount`, as a user: `system:serviceaccount:NAMESPACE:NAME`.
    pub agents: String,
    /// The namespace of the record.
    pub namespace: String,
    /// The `ConfigMap` with the evictions that count.
    pub record: String,
    /// How many are allowed.
    pub budgets: Budgets,
    /// This replica.
    pub identity: String,
    /// What Prometheus is told.
    pub metrics: GuardMetrics,
}

/// The guard, and what has to be awaited for it to know anything.
pub fn start(
    client: Client,
    options: Options,
    standing: watch::Receiver<Standing>,
) -> (Guard, BoxFuture<'static, ()>) {
    let (asks, asked) = mpsc::channel(MOST_WAITING);
    let shared = Shared::default();
    let place = Place {
        namespace: options.namespace,
        name: options.record,
        budgets: options.budgets,
    };
    let books = Books::new(
        client.clone(),
        place,
        standing.clone(),
        shared.clone(),
        asked,
        options.metrics.clone(),
    );
    let guard = Guard {
        teller: Teller::new(client.clone(), &options.identity),
        client,
        agents: options.agents,
        standing,
        shared,
        asks,
        metrics: options.metrics,
    };
    (guard, books.keep().boxed())
}
