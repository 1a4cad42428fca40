//! Connections of agents: HTTP/2 over TLS, kept open while reports arrive.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{Id, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::super::certificates::Tls;
use super::super::listener;
use super::super::write_timeout::WriteTimeout;
use super::connections::{AgentConnections, NewConnections};
use super::handler::{Answer, ReportHandler};
use super::interval::Meter;
use crate::clock;
use crate::crd::report::{MAX_ACCEPTED_BYTES, MAX_INTERVAL};

/// Time limit for the first accepted report.
const FIRST_REPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for each following accepted report.
const NEXT_REPORT_TIMEOUT: Duration = MAX_INTERVAL.saturating_mul(3);
/// Time limit for an agent that reads nothing.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of connections without an accepted report.
const MAX_NEW: usize = 256;
/// Minimum time that they are kept.
const MIN_STAY: Duration = Duration::from_millis(250);
/// Limit of connections per node.
const MAX_PER_NODE: usize = 2;
/// Limit of concurrent requests per connection; agents send one at a time.
const MAX_STREAMS: u32 = 4;
/// The minimum of HTTP/2.
const CONNECTION_WINDOW: u32 = 65_535;
/// More than the body size limit, so that an oversized body is detected.
const STREAM_WINDOW: u32 = 32 << 10;
const MAX_HEADER_BYTES: u32 = 12 << 10;
/// HTTP/2 pings detect dead peers.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// How often the load is measured.
const MEASURE_INTERVAL: Duration = Duration::from_secs(2);

/// Accepts connections forever. Dropping the future closes them all.
pub async fn listen(
    listener: TcpListener,
    handler: Arc<ReportHandler>,
    tls: watch::Receiver<Option<Tls>>,
) {
    let all = Arc::new(Connections {
        new: NewConnections::new(MAX_NEW, MIN_STAY),
        agents: AgentConnections::new(MAX_PER_NODE),
    });
    tokio::join!(
        accept_all(listener, &handler, tls, &all),
        measure(&handler, &all)
    );
}

struct Connections {
    new: NewConnections,
    agents: AgentConnections,
}

async fn accept_all(
    listener: TcpListener,
    handler: &Arc<ReportHandler>,
    tls: watch::Receiver<Option<Tls>>,
    all: &Arc<Connections>,
) {
    let mut connections = JoinSet::new();
    loop {
        let stream = listener::accept(&listener, &mut connections).await;
        let Some(tls) = tls.borrow().clone() else {
            handler.metrics.cut("no_certificate");
            continue;
        };
        if all.new.evict_oldest().await {
            handler.metrics.cut("too_many_new");
        }
        let serving = serve(stream, tls, Arc::clone(handler), Arc::clone(all));
        all.new.enter(|| connections.spawn(serving));
    }
}

/// Updates metrics and the limits.
async fn measure(handler: &ReportHandler, all: &Connections) {
    let mut ticks = interval(MEASURE_INTERVAL);
    // Missed ticks are not made up for.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut meter = Meter::default();
    loop {
        ticks.tick().await;
        if let Some(busy) = meter.busy(clock::boot_time(), clock::thread_time()) {
            handler.measure(busy);
        }
        let (new, agents) = (all.new.len(), all.agents.len());
        handler.metrics.connected(new, agents);
    }
}

/// State of one connection.
struct ConnectionState {
    handler: Arc<ReportHandler>,
    all: Arc<Connections>,
    id: Option<Id>,
    /// When it is closed.
    until: Mutex<Instant>,
    node: OnceLock<Arc<str>>,
}

impl ConnectionState {
    fn until(&self) -> Instant {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let answered = self.handler.answer(request).await;
        if let Some(node) = &answered.node {
            self.extend(node);
        }
        answered.answer
    }

    /// A report of this node was accepted.
    fn extend(&self, node: &Arc<str>) {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) =
            Instant::now() + NEXT_REPORT_TIMEOUT;
        if self.node.get().is_some() {
            return;
        }
        let one = self.id.and_then(|id| self.all.new.leave(id));
        if let Some(one) = one
            && self.node.set(Arc::clone(node)).is_ok()
            && self.all.agents.enter(node, one)
        {
            self.handler.metrics.cut("too_many_of_a_node");
        }
    }
}

impl Drop for ConnectionState {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        match self.node.get() {
            Some(node) => self.all.agents.leave(node, id),
            None => drop(self.all.new.leave(id)),
        }
    }
}

async fn serve(stream: TcpStream, tls: Tls, handler: Arc<ReportHandler>, all: Arc<Connections>) {
    let state = Arc::new(ConnectionState {
        handler,
        all,
        id: tokio::task::try_id(),
        until: Mutex::new(Instant::now() + FIRST_REPORT_TIMEOUT),
        node: OnceLock::new(),
    });
    let Some(stream) = listener::handshake(stream, tls.reports).await else {
        state.handler.metrics.cut("no_handshake");
        return;
    };
    let service = {
        let state = Arc::clone(&state);
        service_fn(move |request| {
            let state = Arc::clone(&state);
            async move { Ok::<_, Infallible>(state.answer(request).await) }
        })
    };
    let stream = TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT, Arc::default()));
    let connection = builder().serve_connection(stream, service);
    tokio::pin!(connection);
    loop {
        tokio::select! {
            // Clients may disconnect at any time.
            _ = &mut connection => return,
            () = sleep_until(state.until()) => {}
        }
        if state.until() <= Instant::now() {
            state.handler.metrics.cut("too_slow");
            return;
        }
    }
}

fn builder() -> http2::Builder<TokioExecutor> {
    let mut http = http2::Builder::new(TokioExecutor::new());
    http.timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEADER_BYTES)
        .max_send_buf_size(MAX_ACCEPTED_BYTES)
        .max_pending_accept_reset_streams(8)
        .max_local_error_reset_streams(16)
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE);
    http
}
