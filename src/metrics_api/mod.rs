//! `metrics.plimsoll.dev/v1alpha1`: the `NodeMetrics` of all nodes, served from memory as an aggregated API.
//!
//! Every replica answers what is always the same (discovery, `OpenAPI`, health); objects come from the replica that
//! leads, to which the others pass requests on. [`store::Store`] and all that shapes questions and answers is pure.

pub mod authn;
mod authorities;
mod authz;
mod certificates;
pub mod compose;
pub mod data;
mod discovery;
mod documents;
pub mod encode;
mod feed;
mod forward;
mod front_proxy;
mod listener;
pub mod negotiate;
mod openapi;
pub mod options;
mod patience;
mod server;
mod status;
pub mod store;
pub mod table;
mod watch;

use std::net::SocketAddr;
use std::sync::Arc;

use kube::Client;
use tokio::sync::watch as channel;

use crate::cluster::election::Standing;
use crate::serve::{self, ServeError};

use authn::Authenticator;
use authz::Authorizer;
use certificates::Keeper;
use data::Data;
use documents::Documents;
use front_proxy::Trust;
use server::Api;
use store::Limits;

pub use certificates::Place;
pub use feed::Feed;
pub use status::Refusal;

/// How it is served.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where.
    pub listen: SocketAddr,
    /// Its Service and Secret.
    pub place: Place,
}

/// Who is told how it goes.
pub trait Observer: Send + Sync {
    /// A request was answered with this code: `get`, `list`, `watch`, `discovery`, `health`, or `other`.
    fn answered(&self, what: &'static str, code: u16);
    /// Whether there is a certificate to serve with, or why not.
    fn certified(&self, outcome: Result<(), &str>);
}

/// Listens, and says how the store is fed and what has to run for requests to be answered.
///
/// # Errors
/// The address can't be listened on.
pub async fn start(
    client: Client,
    options: Options,
    standing: channel::Receiver<Standing>,
    observer: Arc<dyn Observer>,
) -> Result<(Feed, impl Future<Output = ()>), ServeError> {
    let listener = serve::listen(options.listen).await?;
    let data = Arc::new(Data::new(Limits::default(), standing.clone()));
    let feed = Feed::new(Arc::clone(&data));
    let (trust, trusted) = channel::channel(Trust::default());
    let (tls, kept) = channel::channel(None);
    let api = Api {
        data,
        documents: Documents::default(),
        authenticator: Authenticator::new(client.clone(), trusted),
        authorizer: Authorizer::new(client.clone()),
        standing: standing.clone(),
        tls: kept.clone(),
        server_name: options.place.server_name(),
        observer: Arc::clone(&observer),
    };
    let keeper = Keeper::new(client.clone(), options.place, standing, tls, observer);
    let serving = async move {
        tokio::select! {
            () = listener::listen(listener, Arc::new(api), kept) => {}
            () = front_proxy::follow(client, trust) => {}
            () = keeper.keep() => {}
        }
    };
    Ok((feed, serving))
}
