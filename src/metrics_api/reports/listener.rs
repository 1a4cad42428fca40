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
use super::super::patience::Patience;
use super::desk::{Answer, Desk};
use super::pace::Meter;
use super::room::{Agents, Newcomers};
use crate::cluster::clock;
use crate::crd::report::{LONGEST_INTERVAL, REFUSED_BYTES};

/// Time limit for the first accepted report.
const FIRST: Duration = Duration::from_secs(10);
/// Time limit for each following accepted report.
const NEXT: Duration = LONGEST_INTERVAL.saturating_mul(3);
/// Time limit for an agent that reads nothing.
const TAKES: Duration = Duration::from_secs(10);
/// Limit of connections without an accepted report.
const MOST_NEW: usize = 256;
/// Minimum time that they are kept.
const LEAST_STAY: Duration = Duration::from_millis(250);
/// Limit of connections per node.
const MOST_OF_A_NODE: usize = 2;
/// Limit of concurrent requests per connection; agents send one at a time.
const MOST_STREAMS: u32 = 4;
/// The minimum of HTTP/2.
const WINDOW: u32 = 65_535;
/// More than the body size limit, so that an oversized body is detected.
const STREAM: u32 = 32 << 10;
const MOST_HEADERS: u32 = 12 << 10;
/// HTTP/2 pings detect dead peers.
const ALIVE: Duration = Duration::from_secs(20);
/// How often the load is measured.
const LOOK: Duration = Duration::from_secs(2);

/// Accepts connections forever. Dropping the future closes them all.
pub async fn listen(listener: TcpListener, desk: Arc<Desk>, tls: watch::Receiver<Option<Tls>>) {
    let rooms = Arc::new(Rooms {
        newcomers: Newcomers::new(MOST_NEW, LEAST_STAY),
        agents: Agents::new(MOST_OF_A_NODE),
    });
    tokio::join!(take(listener, &desk, tls, &rooms), measure(&desk, &rooms));
}

struct Rooms {
    newcomers: Newcomers,
    agents: Agents,
}

async fn take(
    listener: TcpListener,
    desk: &Arc<Desk>,
    tls: watch::Receiver<Option<Tls>>,
    rooms: &Arc<Rooms>,
) {
    let mut connections = JoinSet::new();
    loop {
        let stream = listener::accept(&listener, &mut connections).await;
        let Some(tls) = tls.borrow().clone() else {
            desk.metrics.cut("no_certificate");
            continue;
        };
        if rooms.newcomers.make_room().await {
            desk.metrics.cut("too_many_new");
        }
        let (desk, room) = (Arc::clone(desk), Arc::clone(rooms));
        rooms
            .newcomers
            .enter(|| connections.spawn(serve(stream, tls, desk, room)));
    }
}

/// Updates metrics and the pace.
async fn measure(desk: &Desk, rooms: &Rooms) {
    let mut looks = interval(LOOK);
    // Missed ticks are not made up for.
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut meter = Meter::default();
    loop {
        looks.tick().await;
        if let Some(busy) = meter.busy(clock::now(), clock::thread()) {
            desk.measure(busy);
        }
        let (newcomers, agents) = (rooms.newcomers.len(), rooms.agents.len());
        desk.metrics.connected(newcomers, agents);
    }
}

/// State of one connection.
struct Guest {
    desk: Arc<Desk>,
    rooms: Arc<Rooms>,
    id: Option<Id>,
    /// When it is closed.
    until: Mutex<Instant>,
    node: OnceLock<Arc<str>>,
}

impl Guest {
    fn until(&self) -> Instant {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let answered = self.desk.answer(request).await;
        if let Some(node) = &answered.node {
            self.stay(node);
        }
        answered.answer
    }

    /// A report of this node was accepted.
    fn stay(&self, node: &Arc<str>) {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + NEXT;
        if self.node.get().is_some() {
            return;
        }
        let one = self.id.and_then(|id| self.rooms.newcomers.leave(id));
        if let Some(one) = one
            && self.node.set(Arc::clone(node)).is_ok()
            && self.rooms.agents.enter(node, one)
        {
            self.desk.metrics.cut("too_many_of_a_node");
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        match self.node.get() {
            Some(node) => self.rooms.agents.leave(node, id),
            None => drop(self.rooms.newcomers.leave(id)),
        }
    }
}

async fn serve(stream: TcpStream, tls: Tls, desk: Arc<Desk>, rooms: Arc<Rooms>) {
    let guest = Arc::new(Guest {
        desk,
        rooms,
        id: tokio::task::try_id(),
        until: Mutex::new(Instant::now() + FIRST),
        node: OnceLock::new(),
    });
    let Some(stream) = listener::shake_hands(stream, tls.reports).await else {
        guest.desk.metrics.cut("no_handshake");
        return;
    };
    let service = {
        let guest = Arc::clone(&guest);
        service_fn(move |request| {
            let guest = Arc::clone(&guest);
            async move { Ok::<_, Infallible>(guest.answer(request).await) }
        })
    };
    let stream = TokioIo::new(Patience::new(stream, TAKES, Arc::default()));
    let connection = builder().serve_connection(stream, service);
    tokio::pin!(connection);
    loop {
        tokio::select! {
            // Clients may disconnect at any time.
            _ = &mut connection => return,
            () = sleep_until(guest.until()) => {}
        }
        if guest.until() <= Instant::now() {
            guest.desk.metrics.cut("too_slow");
            return;
        }
    }
}

fn builder() -> http2::Builder<TokioExecutor> {
    let mut http = http2::Builder::new(TokioExecutor::new());
    http.timer(TokioTimer::new())
        .max_concurrent_streams(MOST_STREAMS)
        .initial_stream_window_size(STREAM)
        .initial_connection_window_size(WINDOW)
        .max_header_list_size(MOST_HEADERS)
        .max_send_buf_size(REFUSED_BYTES)
        .max_pending_accept_reset_streams(8)
        .max_local_error_reset_streams(16)
        .keep_alive_interval(ALIVE)
        .keep_alive_timeout(ALIVE);
    http
}
