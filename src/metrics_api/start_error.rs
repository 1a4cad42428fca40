//! Why the API did not start.

use std::io;

use thiserror::Error;

use crate::cluster::client::ClientError;
use crate::serve::ServeError;

/// Why the API did not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The address can't be listened on.
    #[error(transparent)]
    Listen(#[from] ServeError),
    /// The thread or its runtime can't be created.
    #[error("failed to start the thread of the metrics API")]
    Thread(#[from] io::Error),
    /// There is no client for the API server.
    #[error(transparent)]
    Client(#[from] ClientError),
}
