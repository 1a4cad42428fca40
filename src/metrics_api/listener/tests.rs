use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use jiff::Timestamp;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::clock;
use crate::cluster::election::{Leadership, Term};
use crate::metrics_api::ApiObserver;
use crate::metrics_api::authn::Authenticator;
use crate::metrics_api::authz::Authorizer;
use crate::metrics_api::certificates::Pair;
use crate::metrics_api::data::Data;
use crate::metrics_api::documents::Documents;
use crate::metrics_api::front_proxy::Trust;
use crate::metrics_api::in_flight::RequestsInFlight;
use crate::metrics_api::readiness::Readiness;
use crate::metrics_api::store::{Limits, ObjectContent};

use super::*;

const NODES: usize = 5000;
/// Size of a node's status with a full report.
const STATUS: usize = 3500;
const TIMEOUT: Duration = Duration::from_mins(2);

/// Records calls of the observer.
#[derive(Default)]
struct Observed {
    max_pinned: AtomicUsize,
    slowest_cut: AtomicUsize,
    new_cut: AtomicUsize,
}

impl ApiObserver for Observed {
    fn answered(&self, _: &'static str, _: u16) {}
    fn certified(&self, _: Result<(), &str>) {}
    fn certificates_reconciled(&self, _: Option<Timestamp>, _: bool) {}
    fn front_proxy_loaded(&self, _: Result<(), &str>) {}
    fn ready(&self) -> Result<(), String> {
        Ok(())
    }
    fn pinned(&self, bytes: usize) {
        self.max_pinned.fetch_max(bytes, Ordering::Relaxed);
    }
    fn cut(&self, reason: &'static str) {
        match reason {
            "pinned" => self.slowest_cut.fetch_add(1, Ordering::Relaxed),
            "too_many_new" => self.new_cut.fetch_add(1, Ordering::Relaxed),
            _ => panic!("{reason}"),
        };
    }
}

/// A leader that serves an API server, without the TLS handshake.
struct Leader {
    api: Arc<Api>,
    data: Arc<Data>,
    observed: Arc<Observed>,
    address: SocketAddr,
    serving: JoinHandle<()>,
    stop: watch::Sender<bool>,
    _leadership: watch::Sender<Leadership>,
    _trust: watch::Sender<Option<Trust>>,
    _tls: watch::Sender<Option<Tls>>,
}

/// A front-proxy CA, and an API server's certificate of it.
fn front_proxy() -> (Trust, Arc<[CertificateDer<'static>]>) {
    let keys = [KeyPair::generate().unwrap(), KeyPair::generate().unwrap()];
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let pem = params.self_signed(&keys[0]).unwrap().pem();
    let [authority, own] = keys;
    let issuer = Issuer::new(params, authority);
    let certificate = CertificateParams::default().signed_by(&own, &issuer);
    let headers = |key: &str, header: &str| (key.to_owned(), format!("[{header:?}]"));
    let trust = Trust::of(&BTreeMap::from([
        ("requestheader-client-ca-file".to_owned(), pem),
        headers("requestheader-username-headers", "X-Remote-User"),
        headers("requestheader-group-headers", "X-Remote-Group"),
    ]));
    (trust.unwrap(), [certificate.unwrap().der().clone()].into())
}

/// Accepts connections as [`listen`] does, from clients with these certificates.
async fn serve(
    listener: TcpListener,
    api: Arc<Api>,
    certificates: Arc<[CertificateDer<'static>]>,
    stop: watch::Receiver<bool>,
) {
    let all = Arc::new(Connections::default());
    let mut connections = JoinSet::new();
    let take = async {
        loop {
            let stream = accept(&listener, &mut connections).await;
            let connection = Connection::new(&api, &all, stop.clone());
            connections.spawn(connection.answer(stream, Arc::clone(&certificates)));
        }
    };
    tokio::select! {
        () = take => {}
        () = limit_memory(&api, &all.lags) => {}
    }
}

impl Leader {
    /// With 5000 nodes, and this limit of lists and watches per user.
    fn start(per_user: usize) -> Self {
        let until = clock::boot_time() + Duration::from_hours(1);
        let (leadership, elected) =
            watch::channel(Leadership::new(Some(Term { epoch: 1, until }), None));
        let data = Arc::new(Data::new(Limits::default(), elected.clone()));
        data.change(|store| store.lead(1));
        let nowhere = kube::Config::new("http://127.0.0.1:9".parse().unwrap());
        let client = kube::Client::try_from(nowhere).unwrap();
        let (trust, certificates) = front_proxy();
        let (trust, trusted) = watch::channel(Some(trust));
        let (stop, stopped) = watch::channel(false);
        let (tls, tls_receiver) = watch::channel(None);
        let observed = Arc::<Observed>::default();
        let api = Arc::new(Api {
            data: Arc::clone(&data),
            documents: Documents::default(),
            authenticator: Authenticator::new(client.clone(), trusted),
            authorizer: Authorizer::new(client),
            leadership: elected,
            tls: tls_receiver,
            server_name: String::new(),
            stop: stopped.clone(),
            waiting: Semaphore::new(NODES),
            in_flight: Arc::new(RequestsInFlight::new(per_user)),
            readiness: Arc::new(Readiness::new(Arc::clone(&observed) as _)),
            observer: Arc::clone(&observed) as _,
            reports: None,
        });
        let listener = open("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(serve(listener, Arc::clone(&api), certificates, stopped));
        let leader = Self {
            api,
            data,
            observed,
            address,
            serving,
            stop,
            _leadership: leadership,
            _trust: trust,
            _tls: tls,
        };
        leader.report(0);
        leader
    }

    /// All nodes report new figures.
    fn report(&self, round: usize) {
        self.data.change(|store| {
            for node in 0..NODES {
                let name = format!("node{node:04}");
                let content = ObjectContent {
                    metadata: format!(r#""name":"{name}""#).into(),
                    status: format!(r#"{{"pods":{round},"more":"{}"}}"#, "x".repeat(STATUS)).into(),
                    ..ObjectContent::default()
                };
                store.apply(&name, content);
            }
        });
        self.data.notify_watches();
    }

    /// Sends a request of a user on its own connection.
    async fn send_get(&self, user: &str, query: &str) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        // Unread data must wait in the leader, not in the kernel.
        socket.set_recv_buffer_size(16 << 10).unwrap();
        let mut stream = socket.connect(self.address).await.unwrap();
        let request = format!(
            "GET /apis/metrics.plimsoll.dev/v1alpha1/nodemetrics{query} HTTP/1.1\r\nhost: it\r\nconnection: close\r\n\
             x-remote-user: {user}\r\nx-remote-group: system:masters\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// Status code of the answer.
    async fn code(&self, user: &str, query: &str) -> (u16, TcpStream) {
        let mut stream = self.send_get(user, query).await;
        let mut line = [0; 12];
        let read = timeout(TIMEOUT, stream.read_exact(&mut line)).await;
        read.unwrap().unwrap();
        let line = String::from_utf8(line.to_vec()).unwrap();
        (line.rsplit_once(' ').unwrap().1.parse().unwrap(), stream)
    }

    /// The rounds in a complete list, read at full speed.
    async fn listed(&self) -> Vec<Value> {
        let mut stream = self.send_get("other", "").await;
        let mut answer = Vec::new();
        let read = timeout(TIMEOUT, stream.read_to_end(&mut answer)).await;
        read.unwrap().unwrap();
        let (_, body) = std::str::from_utf8(&answer)
            .unwrap()
            .split_once("\r\n\r\n")
            .unwrap();
        let list: Value = serde_json::from_str(&joined(body)).unwrap();
        let items = list["items"].as_array().unwrap().iter();
        items.map(|item| item["status"]["pods"].clone()).collect()
    }
}

/// Decodes a chunked body.
fn joined(mut body: &str) -> String {
    let mut content = String::new();
    while let Some((length, rest)) = body.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).unwrap();
        content.push_str(&rest[..length]);
        body = &rest[length + 2..];
    }
    content
}

/// Reads slowly, but enough not to be cut for that. Returns whether it was cut.
fn reads_slowly(mut stream: TcpStream) -> JoinHandle<bool> {
    tokio::spawn(async move {
        let mut part = [0; 4 << 10];
        loop {
            match stream.read(&mut part).await {
                Ok(0) | Err(_) => return true,
                Ok(_) => sleep(Duration::from_millis(100)).await,
            }
        }
    })
}

/// Watches from now on, and tracks the newest round seen.
async fn follows(leader: &Leader) -> Arc<AtomicUsize> {
    let (code, mut stream) = leader.code("follower", "?watch=1&resourceVersion=").await;
    assert_eq!(code, 200);
    let (newest, seen) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let see = Arc::clone(&seen);
    tokio::spawn(async move {
        let (mut part, mut text) = (vec![0; 1 << 16], String::new());
        while let Ok(read @ 1..) = stream.read(&mut part).await {
            text.push_str(std::str::from_utf8(&part[..read]).unwrap());
            let found = text
                .rsplit_once(r#""pods":"#)
                .and_then(|(_, rest)| rest.split_once(','));
            if let Some(round) = found.and_then(|(round, _)| round.parse().ok()) {
                newest.fetch_max(round, Ordering::Relaxed);
                see.store(newest.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            text.drain(..text.len().saturating_sub(64));
        }
        see.store(usize::MAX, Ordering::Relaxed);
    });
    seen
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let waited = async {
        while !condition() {
            sleep(CHECK_INTERVAL).await;
        }
    };
    timeout(TIMEOUT, waited).await.expect(what);
}

#[tokio::test]
async fn the_kernel_buffers_little_for_a_client_that_does_not_read() {
    let listener = open("127.0.0.1:0".parse().unwrap()).unwrap();
    let _client = TcpStream::connect(listener.local_addr().unwrap()).await;
    let (stream, _) = listener.accept().await.unwrap();
    let (part, mut taken) = (vec![0; 1 << 16], 0);
    while timeout(CHECK_INTERVAL, stream.writable()).await.is_ok() {
        taken += stream.try_write(&part).unwrap_or(0);
    }
    assert!(taken < 1 << 20, "{taken} bytes");
}

#[tokio::test]
async fn fifty_slow_readers_of_5000_nodes_stay_within_the_memory_limit() {
    const ROUNDS: usize = 10;
    let leader = Leader::start(100);
    let follower = follows(&leader).await;
    let mut slow = Vec::new();
    for round in 1..=ROUNDS {
        for reader in 0..5 {
            let query = if reader == 0 { "?watch=1" } else { "" };
            let (code, stream) = leader.code("slow", query).await;
            assert_eq!(code, 200);
            slow.push(reads_slowly(stream));
        }
        // The objects that they are being sent are replaced immediately, which would normally take 10 s.
        leader.report(round);
        until("the watch continues", || {
            follower.load(Ordering::Relaxed) == round
        })
        .await;
        sleep(2 * CHECK_INTERVAL).await;
        until("memory is within its limit", || {
            leader.data.pinned() <= MAX_PINNED
        })
        .await;
    }
    let round = NODES * STATUS;
    // Without the limit, fifty different snapshots would take ten times the size of a list.
    let most = leader.observed.max_pinned.load(Ordering::Relaxed);
    assert!(most > MAX_PINNED, "{most} bytes: the limit was not reached");
    assert!(most < MAX_PINNED + 2 * round, "{most} bytes were pinned");
    let cut = leader.observed.slowest_cut.load(Ordering::Relaxed);
    assert!((1..slow.len()).contains(&cut), "{cut} were cut");
    // Other clients can still list.
    assert_eq!(leader.listed().await, vec![ROUNDS; NODES]);
    // Disconnected clients hold no memory.
    for reader in slow {
        reader.abort();
    }
    until("all memory is released", || leader.data.pinned() == 0).await;
    leader.serving.abort();
}

/// TLS configuration of a replica.
fn tls() -> Tls {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::default().self_signed(&key).unwrap();
    let pair = Pair {
        chain: vec![certificate.der().clone()],
        key: key.into(),
    };
    let roots = [certificate.der().clone()];
    Tls::new(&pair, &roots, "replica".to_owned()).unwrap()
}

#[tokio::test]
async fn every_connection_has_time_for_its_handshake_in_a_flood() {
    let leader = Leader::start(1);
    let listener = open("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let (_tls, tls_receiver) = watch::channel(Some(tls()));
    let stop = leader.stop.subscribe();
    let listening = tokio::spawn(listen(
        listener,
        Arc::clone(&leader.api),
        tls_receiver,
        stop,
    ));
    let started = Instant::now();
    let mut first = TcpStream::connect(address).await.unwrap();
    let mut flood = Vec::new();
    for _ in 0..2 * MAX_UNKNOWN {
        flood.push(TcpStream::connect(address).await.unwrap());
    }
    // It is the oldest of too many; its own handshake timeout would be 5 s.
    let read = timeout(Duration::from_secs(4), first.read(&mut [0])).await;
    assert!(matches!(read, Ok(Ok(0) | Err(_))), "{read:?}");
    assert!(started.elapsed() >= MIN_STAY, "{:?}", started.elapsed());
    assert!(leader.observed.new_cut.load(Ordering::Relaxed) > 0);
    listening.abort();
    leader.serving.abort();
}

#[tokio::test]
async fn lists_and_watches_are_limited_per_user() {
    let leader = Leader::start(2);
    let (first, _first) = leader.code("ann", "?watch=1").await;
    let (second, second_stream) = leader.code("ann", "?watch=1").await;
    let (third, _) = leader.code("ann", "?watch=1").await;
    let (list, _) = leader.code("ann", "").await;
    assert_eq!([first, second, third, list], [200, 200, 429, 429]);
    // Getting single objects is not limited, and other users have their own limit.
    assert_eq!(leader.code("ann", "/node0001").await.0, 200);
    assert_eq!(leader.code("bob", "?watch=1").await.0, 200);
    drop(second_stream);
    let again = async {
        while leader.code("ann", "?watch=1").await.0 != 200 {
            sleep(CHECK_INTERVAL).await;
        }
    };
    timeout(TIMEOUT, again)
        .await
        .expect("a slot is free after a watch has ended");
    leader.serving.abort();
}
