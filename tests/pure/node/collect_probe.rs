//! HTTP probes against various servers on the loopback interface.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::collect_support::wait_for;
use plimsoll::engine::Demand;
use plimsoll::engine::metric::Metric;
use plimsoll::engine::policy::{Action, PolicySet, Probe, Rule, RuleId, Strategy};
use plimsoll::engine::sample::Sample;
use plimsoll::node::collect::Prober;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

const LONG: Duration = Duration::from_secs(20);
const NOTHING: [f64; 0] = [];

/// Calls `answer` for each connection; runs until the process exits.
struct Server {
    address: String,
    connections: Arc<AtomicUsize>,
}

impl Server {
    fn start(answer: impl Fn(TcpStream) + Send + 'static) -> Self {
        Self::listening(TcpListener::bind("127.0.0.1:0").unwrap(), answer)
    }

    fn listening(listener: TcpListener, answer: impl Fn(TcpStream) + Send + 'static) -> Self {
        let address = listener.local_addr().unwrap().to_string();
        let connections = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connections);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                count.fetch_add(1, Ordering::SeqCst);
                answer(stream.unwrap());
            }
        });
        Self {
            address,
            connections,
        }
    }

    /// Responds to every request with this text.
    fn with_text(text: impl Into<Vec<u8>>) -> Self {
        let text = text.into();
        Self::start(move |mut stream| {
            request_head(&mut stream);
            let _ = stream.write_all(&ok(&text));
        })
    }

    fn url(&self) -> String {
        format!("http://{}/metrics", self.address)
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

fn ok(text: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", text.len());
    [head.as_bytes(), text].concat()
}

fn request_head(stream: &mut impl Read) -> Vec<String> {
    let lines = BufReader::new(stream).lines();
    lines
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
        .collect()
}

/// One probe for the series `depth`.
struct SentProbe {
    prober: Prober,
    demand: Demand,
    sample: Sample,
}

fn probe(url: &str, timeout: Duration) -> Probe {
    Probe {
        url: url.into(),
        headers: vec![("X-Token".into(), "seven".into())],
        timeout,
    }
}

fn rule(probe: Probe, series: &str) -> Rule {
    Rule {
        id: RuleId::from("n/r"),
        metric: Metric::Probe(series.into()),
        series: None,
        threshold: 1.0,
        restore_value: 1.0,
        avoidance_threshold: 1,
        restore_threshold: 1,
        sample_ttl: Duration::from_mins(1),
        probe: Some(probe),
        action: Arc::new(Action {
            name: "a".into(),
            cool_down: Duration::from_secs(1),
            scheduling: None,
            throttle: None,
            force_gc: false,
            eviction: None,
        }),
        strategy: Strategy::Preview,
        active_during: Vec::new(),
    }
}

impl SentProbe {
    fn new(url: &str) -> Self {
        Self::with(probe(url, LONG))
    }

    fn with(probe: Probe) -> Self {
        Self::on_node(probe, Ipv4Addr::LOCALHOST.into())
    }

    fn on_node(probe: Probe, node: IpAddr) -> Self {
        let mut prober = Prober::new(node);
        let policy = PolicySet {
            rules: vec![rule(probe.clone(), "depth")],
            pods: Vec::new(),
        };
        prober.set_policy(&policy).unwrap();
        let demand = Demand {
            probes: vec![probe],
            ..Demand::default()
        };
        Self {
            prober,
            demand,
            sample: Sample::default(),
        }
    }

    fn values(&mut self) -> Vec<f64> {
        self.prober.fill(&mut self.sample);
        let series = self.sample.probes.iter().flat_map(|it| it.series.iter());
        series.map(|series| series.value).collect()
    }

    fn failure(&self) -> Option<String> {
        let failure = self.prober.failures().next();
        failure.map(|(_, error)| error.to_string())
    }

    /// Sends the probe, and waits for values or a failure.
    fn outcome(&mut self) -> Result<Vec<f64>, String> {
        self.prober.set_demand(&self.demand);
        let came = wait_for(LONG, || {
            !self.values().is_empty() || self.failure().is_some()
        });
        assert!(came, "neither a response nor a failure");
        self.failure().map_or_else(|| Ok(self.values()), Err)
    }
}

#[test]
fn a_probe_without_a_host_goes_to_the_node() {
    for node in ["127.0.0.2", "::1"] {
        let node: IpAddr = node.parse().unwrap();
        let Ok(listener) = TcpListener::bind(SocketAddr::new(node, 0)) else {
            eprintln!("skipped: this machine has no {node}");
            continue;
        };
        let port = listener.local_addr().unwrap().port();
        let server = Server::listening(listener, |mut stream| {
            let head = request_head(&mut stream);
            let host = head.iter().find_map(|line| line.strip_prefix("host: "));
            let depth = format!("depth {}\n", host.map_or(0, str::len));
            let _ = stream.write_all(&ok(depth.as_bytes()));
        });
        let url = format!("http://:{port}/metrics");
        let mut asked = SentProbe::on_node(probe(&url, LONG), node);
        let host = server.address.len() as f64;
        assert_eq!(asked.outcome(), Ok(vec![host]));
        // Rules find the response by the URL in the policy.
        assert_eq!(*asked.sample.probes[0].url, *url);
    }
    // Nothing listens there; the message names the address.
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let url = format!("http://:{}/metrics", free.port());
    let mut asked = SentProbe::new(&url);
    asked.outcome().unwrap_err();
    let (named, _) = asked.prober.failures().next().unwrap();
    assert_eq!(**named, format!("http://{free}/metrics"));
}

#[test]
fn headers_are_sent_and_only_named_series_used() {
    let (sent, heads) = mpsc::channel();
    let server = Server::start(move |mut stream| {
        let _ = sent.send(request_head(&mut stream));
        let text =
            b"# HELP depth x\ndepth{queue=\"mail\"} 7\nother 1\ndepth{queue=\"web\"} +Inf 12\n";
        let _ = stream.write_all(&ok(text));
    });
    let mut asked = SentProbe::new(&server.url());
    assert_eq!(asked.outcome(), Ok(vec![7.0, f64::INFINITY]));
    let head = heads.recv().unwrap();
    assert_eq!(head[0], "GET /metrics HTTP/1.1");
    let sent = head
        .iter()
        .any(|it| it.eq_ignore_ascii_case("x-token: seven"));
    assert!(sent, "{head:?}");
    let answer = &asked.sample.probes[0];
    assert_eq!(*answer.url, *server.url());
    assert_eq!(*answer.series[0].labels[0].1, *"mail");
}

#[test]
fn self_signed_https_certificates_are_accepted() {
    let made = rcgen::generate_simple_self_signed(["elsewhere.example".to_owned()]).unwrap();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let config = Arc::new(config);
    let server = Server::start(move |stream| {
        let session = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
        let mut stream = rustls::StreamOwned::new(session, stream);
        request_head(&mut stream);
        let _ = stream.write_all(&ok(b"depth 3\n"));
        stream.conn.send_close_notify();
        let _ = stream.flush();
    });
    let url = server.url().replace("http:", "https:");
    assert_eq!(SentProbe::new(&url).outcome(), Ok(vec![3.0]));
}

#[test]
fn a_hanging_server_blocks_nothing_and_gets_one_request() {
    let (release, released) = mpsc::channel::<()>();
    let server = Server::start(move |mut stream| {
        request_head(&mut stream);
        let _ = released.recv();
        let _ = stream.write_all(&ok(b"depth 5\n"));
    });
    let mut asked = SentProbe::new(&server.url());
    asked.prober.set_demand(&asked.demand);
    assert!(wait_for(LONG, || server.connections() == 1));
    // The server responds only after all of these have returned.
    for _ in 0..100 {
        asked.prober.set_demand(&asked.demand);
        assert_eq!(asked.values(), NOTHING);
    }
    assert_eq!(server.connections(), 1);
    release.send(()).unwrap();
    assert!(wait_for(LONG, || asked.values() == [5.0]));
}

#[test]
fn a_hanging_server_times_out() {
    let server = Server::start(|stream| {
        // Left open without a response.
        std::mem::forget(stream);
    });
    let mut asked = SentProbe::with(probe(&server.url(), Duration::from_millis(50)));
    assert_eq!(asked.outcome(), Err("no response within 50ms".into()));
}

#[test]
fn a_slow_response_times_out() {
    let server = Server::start(|mut stream| {
        request_head(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\ndep");
        std::mem::forget(stream);
    });
    let mut asked = SentProbe::with(probe(&server.url(), Duration::from_millis(50)));
    assert_eq!(asked.outcome(), Err("no response within 50ms".into()));
}

#[test]
fn a_huge_response_is_rejected_with_or_without_its_length() {
    for head in ["Content-Length: 99999999", "Transfer-Encoding: chunked"] {
        let server = Server::start(move |mut stream| {
            request_head(&mut stream);
            let _ = write!(stream, "HTTP/1.1 200 OK\r\n{head}\r\n\r\n");
            let line = "10000\r\n".to_owned() + &"#".repeat(0x10000) + "\r\n";
            while stream.write_all(line.as_bytes()).is_ok() {}
        });
        let outcome = SentProbe::new(&server.url()).outcome();
        assert_eq!(
            outcome,
            Err("the response is longer than 1 MiB".into()),
            "{head}"
        );
    }
}

#[test]
fn invalid_prometheus_text_is_a_failure_with_the_line() {
    let bad_line = "line 1 is not in the Prometheus text format";
    for (text, failure) in [
        (&b"<html>hello</html>\n"[..], bad_line),
        (b"depth{\n", bad_line),
        (b"depth \xff\xfe\n", "the response is not UTF-8 text"),
    ] {
        let server = Server::with_text(text);
        assert_eq!(SentProbe::new(&server.url()).outcome(), Err(failure.into()));
    }
    let server = Server::start(|mut stream| {
        request_head(&mut stream);
        let _ = stream.write_all(b"220 smtp ready\r\n");
    });
    let failure = SentProbe::new(&server.url()).outcome().unwrap_err();
    assert!(failure.starts_with("the request failed: "), "{failure}");
}

#[test]
fn a_truncated_response_is_a_failure() {
    let server = Server::start(|mut stream| {
        request_head(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndepth 1\n");
    });
    let failure = SentProbe::new(&server.url()).outcome().unwrap_err();
    assert!(
        failure.starts_with("failed to read the response"),
        "{failure}"
    );
}

#[test]
fn too_many_series_are_a_failure() {
    let many = "depth 1\n".repeat(5000);
    let failure = SentProbe::new(&Server::with_text(many).url())
        .outcome()
        .unwrap_err();
    assert!(failure.starts_with("more than 4096 series"), "{failure}");
    let others = "other 1\n".repeat(5000);
    let server = Server::with_text(others + "depth 2\n");
    assert_eq!(SentProbe::new(&server.url()).outcome(), Ok(vec![2.0]));
}

#[test]
fn a_refused_connection_is_a_failure() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", free.local_addr().unwrap());
    drop(free);
    let failure = SentProbe::new(&url).outcome().unwrap_err();
    assert!(failure.contains("refused"), "{failure}");
}

#[test]
fn a_redirect_is_not_followed_and_other_statuses_fail() {
    let goal = Server::with_text("depth 1\n");
    let to = goal.url();
    let server = Server::start(move |mut stream| {
        request_head(&mut stream);
        let _ = write!(
            stream,
            "HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n"
        );
    });
    let failure = SentProbe::new(&server.url()).outcome().unwrap_err();
    assert!(
        failure.starts_with("the response is 302 Found, and redirects"),
        "{failure}"
    );
    assert_eq!(goal.connections(), 0);

    let server = Server::start(move |mut stream| {
        request_head(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n");
    });
    let outcome = SentProbe::new(&server.url()).outcome();
    assert_eq!(
        outcome,
        Err("the response is 503 Service Unavailable".into())
    );
}

#[test]
fn an_old_response_keeps_its_time_until_a_newer_one() {
    let turn = AtomicUsize::new(0);
    let server = Server::start(move |mut stream| {
        request_head(&mut stream);
        let answer: Vec<u8> = match turn.fetch_add(1, Ordering::SeqCst) {
            0 => ok(b"depth 1\n"),
            1 => b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n".to_vec(),
            _ => ok(b"depth 2\n"),
        };
        let _ = stream.write_all(&answer);
    });
    let mut asked = SentProbe::new(&server.url());
    assert_eq!(asked.outcome(), Ok(vec![1.0]));
    let first = asked.sample.probes[0].at;

    asked.prober.set_demand(&asked.demand);
    assert!(wait_for(LONG, || asked.failure().is_some()));
    assert_eq!(asked.values(), [1.0]);
    assert_eq!(asked.sample.probes[0].at, first);

    asked.prober.set_demand(&asked.demand);
    assert!(wait_for(LONG, || asked.values() == [2.0]));
    assert!(wait_for(LONG, || asked.failure().is_none()));
    assert!(asked.sample.probes[0].at > first);
}

#[test]
fn a_removed_probe_leaves_the_sample() {
    let server = Server::with_text("depth 1\n");
    let mut asked = SentProbe::new(&server.url());
    assert_eq!(asked.outcome(), Ok(vec![1.0]));
    asked.prober.set_policy(&PolicySet::default()).unwrap();
    assert_eq!(asked.values(), NOTHING);
    assert!(asked.sample.probes.is_empty());
}

#[test]
fn a_probe_in_a_new_policy_keeps_its_response() {
    let server = Server::with_text("depth 1\nwidth 2\n");
    let mut asked = SentProbe::new(&server.url());
    assert_eq!(asked.outcome(), Ok(vec![1.0]));
    let bad = probe("not a url", LONG);
    let mut policy = PolicySet {
        rules: vec![
            rule(asked.demand.probes[0].clone(), "depth"),
            rule(bad.clone(), "depth"),
        ],
        pods: Vec::new(),
    };
    asked.prober.set_policy(&policy).unwrap();
    assert_eq!(asked.values(), [1.0]);
    asked.demand.probes.push(bad);
    asked.prober.set_demand(&asked.demand);
    assert!(wait_for(LONG, || asked.failure().is_some()));
    assert_eq!(asked.values(), [1.0]);

    policy
        .rules
        .push(rule(asked.demand.probes[0].clone(), "width"));
    asked.prober.set_policy(&policy).unwrap();
    asked.prober.set_demand(&asked.demand);
    assert!(wait_for(LONG, || asked.values() == [1.0, 2.0]));
}
