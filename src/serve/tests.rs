use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::*;

/// Long enough for any machine.
const LONG: Duration = Duration::from_mins(1);

struct Well;

impl Source for Well {
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

/// What comes until the connection is closed.
async fn read(stream: &mut TcpStream) -> String {
    let mut text = String::new();
    let read = timeout(LONG, stream.read_to_string(&mut text)).await;
    read.expect("nobody closes the connection").unwrap();
    text
}

async fn ask(stream: &mut TcpStream) -> String {
    let request = b"GET /livez HTTP/1.1\r\nhost: it\r\n\r\n";
    stream.write_all(request).await.unwrap();
    read(stream).await
}

#[tokio::test]
async fn those_who_connect_and_never_ask_keep_no_probe_out() {
    let listener = listen(([127, 0, 0, 1], 0).into()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let connect = async || TcpStream::connect(address).await.unwrap();
    let serving = tokio::spawn(serve(listener, Arc::new(Well)));
    let mut idle = Vec::new();
    for _ in 0..3 * MOST_CONNECTIONS {
        idle.push(connect().await);
    }
    let answer = ask(&mut connect().await).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(read(&mut idle[0]).await, "", "it was closed");
    // Who came late still may ask.
    let answer = ask(idle.last_mut().unwrap()).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    serving.abort();
}
