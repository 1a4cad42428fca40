//! Serves probes and metrics on their own thread, so that a busy event loop does not fail the liveness probe.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;

use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::sync::oneshot;

use super::super::metrics::ControllerMetrics;
use super::RunError;
use crate::serve;

/// Starts to serve. The future resolves if the thread ends, which it never should.
///
/// # Errors
/// The address can't be listened on, or the thread can't be started.
pub(super) fn serve(
    listen: SocketAddr,
    metrics: Arc<ControllerMetrics>,
) -> Result<impl Future<Output = ()>, RunError> {
    let listener = serve::listen(listen)?.into_std()?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let (running, ended) = oneshot::channel::<()>();
    let serving = async move {
        match TcpListener::from_std(listener) {
            Ok(listener) => serve::serve(listener, metrics).await,
            Err(error) => tracing::error!(%error, "failed to serve probes"),
        }
        drop(running);
    };
    let thread = thread::Builder::new().name("probes".to_owned());
    thread.spawn(move || runtime.block_on(serving))?;
    Ok(async { drop(ended.await) })
}
