use std::future::ready;
use std::time::Duration;

use nix::errno::Errno;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::*;

/// Enough for a very slow machine.
const TIMEOUT: Duration = Duration::from_mins(1);

struct Healthy;

impl ServedState for Healthy {
    fn livez(&self) -> Result<(), String> {
        Ok(())
    }

    fn readyz(&self) -> Result<(), String> {
        Ok(())
    }

    fn metrics(&self) -> String {
        String::new()
    }
}

/// Reads until the connection is closed.
async fn read(stream: &mut TcpStream) -> String {
    let mut text = String::new();
    let read = timeout(TIMEOUT, stream.read_to_string(&mut text)).await;
    read.expect("the connection was not closed").unwrap();
    text
}

async fn get_livez(stream: &mut TcpStream) -> String {
    let request = b"GET /livez HTTP/1.1\r\nhost: it\r\n\r\n";
    stream.write_all(request).await.unwrap();
    read(stream).await
}

/// Has a document for local clients only.
struct Private;

impl ServedState for Private {
    fn livez(&self) -> Result<(), String> {
        Ok(())
    }

    fn readyz(&self) -> Result<(), String> {
        Ok(())
    }

    fn metrics(&self) -> String {
        String::new()
    }

    fn document(&self, path: &str, local: bool) -> Option<JsonDocument> {
        let found = if local {
            JsonDocument::Json("{}".to_owned())
        } else {
            JsonDocument::Forbidden("only here".to_owned())
        };
        (path == "/here").then_some(found)
    }
}

#[tokio::test]
async fn loopback_clients_are_recognized() {
    let listener = listen(([127, 0, 0, 1], 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(serve(listener, Arc::new(Private)));
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = b"GET /here HTTP/1.1\r\nhost: it\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let answer = read(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    serving.abort();
    let answer = document("/here", &Private, false);
    assert_eq!(answer.status(), StatusCode::FORBIDDEN);
    for (peer, local) in [
        ("127.0.0.1", true),
        ("::1", true),
        ("::ffff:127.0.0.1", true),
        ("10.0.0.1", false),
        ("::ffff:10.0.0.1", false),
        ("fd00::1", false),
    ] {
        assert_eq!(is_loopback(peer.parse().unwrap()), local, "{peer}");
    }
}

#[tokio::test]
async fn idle_connections_do_not_lock_out_probes() {
    let listener = listen(([127, 0, 0, 1], 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    let connect = async || TcpStream::connect(address).await.unwrap();
    let serving = tokio::spawn(serve(listener, Arc::new(Healthy)));
    let mut idle = Vec::new();
    for _ in 0..3 * MAX_CONNECTIONS {
        idle.push(connect().await);
    }
    let answer = get_livez(&mut connect().await).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(read(&mut idle[0]).await, "", "it was closed");
    // A late connection still works.
    let answer = get_livez(idle.last_mut().unwrap()).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    serving.abort();
}

#[tokio::test]
async fn a_listener_pauses_between_attempts_without_file_descriptors() {
    let mut attempts = 0;
    let out_of_descriptors = || {
        attempts += 1;
        let failed = io::Error::from(Errno::EMFILE);
        ready(Err::<(TcpStream, SocketAddr), _>(failed))
    };
    let waited = timeout(ACCEPT_RETRY_INTERVAL * 4, accepted(out_of_descriptors)).await;
    assert!(waited.is_err());
    assert!((1..=5).contains(&attempts), "{attempts}");
}

#[tokio::test]
async fn a_listener_recovers_when_file_descriptors_are_available() {
    let mut left = 2;
    let peer = SocketAddr::from(([127, 0, 0, 1], 1));
    let accept = || {
        left -= 1;
        ready(if left > 0 {
            Err(io::Error::from(Errno::EMFILE))
        } else {
            Ok(("connection", peer))
        })
    };
    assert_eq!(timeout(TIMEOUT, accepted(accept)).await, Ok("connection"));
}

/// Whether a client can connect to this local address.
async fn gets_in(listener: &TcpListener, client: IpAddr) -> bool {
    let port = listener.local_addr().unwrap().port();
    let connected = TcpStream::connect((client, port)).await;
    connected.is_ok() && timeout(TIMEOUT, listener.accept()).await.is_ok()
}

#[tokio::test]
async fn the_unspecified_address_accepts_both_families() {
    let listener = listen("[::]:0".parse().unwrap()).unwrap();
    assert!(gets_in(&listener, Ipv4Addr::LOCALHOST.into()).await);
    if listener.local_addr().unwrap().is_ipv6() {
        assert!(gets_in(&listener, Ipv6Addr::LOCALHOST.into()).await);
    }
    let ipv4 = listen("0.0.0.0:0".parse().unwrap()).unwrap();
    assert!(gets_in(&ipv4, Ipv4Addr::LOCALHOST.into()).await);
}

#[test]
fn without_ipv6_the_unspecified_address_is_ipv4() {
    let fallback = |address: &str, errno: Errno| {
        let fallback = without_ipv6(address.parse().unwrap(), &errno.into());
        fallback.map(|address| address.to_string())
    };
    let all = Some("0.0.0.0:8080".to_owned());
    assert_eq!(fallback("[::]:8080", Errno::EAFNOSUPPORT), all);
    assert_eq!(fallback("[::]:8080", Errno::EADDRNOTAVAIL), all);
    assert_eq!(fallback("[::]:8080", Errno::EADDRINUSE), None);
    assert_eq!(fallback("[::1]:8080", Errno::EAFNOSUPPORT), None);
}
