//! How commands find the cluster.

use std::path::PathBuf;

use kube::Client;

use crate::cluster::client::{ClientError, connect};
use crate::cluster::kubeconfig::ClusterSource;

/// The cluster, by the same flags as for kubectl.
#[derive(Debug, clap::Args)]
pub struct ClusterArgs {
    /// How to reach the API server [default: $KUBECONFIG, else ~/.kube/config, else the pod's service account]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig [default: its current-context]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
}

impl ClusterArgs {
    /// The cluster that they name.
    pub fn source(&self) -> ClusterSource {
        ClusterSource {
            kubeconfig: self.kubeconfig.clone(),
            context: self.context.clone(),
        }
    }

    /// A client for it.
    pub async fn connect(&self) -> Result<Client, ClientError> {
        connect(&self.source()).await
    }
}
