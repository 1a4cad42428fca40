//! Agents of many nodes on a separate thread. Each reports over its own connection at fixed times (an open loop: a slow
//! controller shows as latency, not as fewer reports).

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ClientConfig;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until, timeout};

use super::api_support::reporter::{Body, connect, full_body, post, runtime, send};
use super::report;

/// How long an agent waits for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The answers to reports.
#[derive(Default)]
pub struct Tally {
    /// Number of reports by answer.
    pub answers: BTreeMap<String, usize>,
    /// From the scheduled time of each report to its answer, in milliseconds.
    pub latencies: Vec<f64>,
    /// Size of the largest report in bytes.
    pub largest: usize,
}

/// All agents. They run until the process exits.
pub struct Agents {
    runtime: Handle,
    trust: Arc<ClientConfig>,
    port: u16,
    tally: Arc<Mutex<Tally>>,
}

impl Agents {
    /// No agents yet, for the controller that receives reports at this port.
    pub fn of(trust: Arc<ClientConfig>, port: u16) -> Self {
        let runtime = runtime();
        let handle = runtime.handle().clone();
        thread::spawn(move || runtime.block_on(pending::<()>()));
        Self {
            runtime: handle,
            trust,
            port,
            tally: Arc::default(),
        }
    }

    /// Starts an agent for each node and token, spread over this time.
    pub fn start(&self, agents: Vec<(String, String)>, within: Duration) {
        let start = Instant::now();
        for (node, token) in agents {
            let agent = Agent {
                node,
                token,
                trust: Arc::clone(&self.trust),
                port: self.port,
                tally: Arc::clone(&self.tally),
                connection: None,
            };
            let first = start + within.mul_f64(fastrand::f64());
            self.runtime.spawn(agent.run(first));
        }
    }

    /// Takes the answers since the last call.
    pub fn take(&self) -> Tally {
        std::mem::take(&mut *self.tally.lock().unwrap())
    }
}

struct Agent {
    node: String,
    token: String,
    trust: Arc<ClientConfig>,
    port: u16,
    tally: Arc<Mutex<Tally>>,
    connection: Option<SendRequest<Body>>,
}

impl Agent {
    async fn run(mut self, mut at: Instant) {
        for sequence in 1.. {
            sleep_until(at).await;
            let body = report::body(&self.node, sequence);
            let bytes = body.len();
            let answer = timeout(TIMEOUT, self.report(body)).await;
            let outcome = match answer {
                Ok(Some(code)) => code.to_string(),
                Ok(None) => "broken".to_owned(),
                Err(_) => "timed out".to_owned(),
            };
            if !matches!(answer, Ok(Some(_))) {
                self.connection = None;
            }
            let mut tally = self.tally.lock().unwrap();
            *tally.answers.entry(outcome).or_default() += 1;
            tally.latencies.push(at.elapsed().as_secs_f64() * 1000.0);
            tally.largest = tally.largest.max(bytes);
            at += Duration::from_secs(report::INTERVAL);
        }
    }

    /// The status code; `None` if the connection broke.
    async fn report(&mut self, body: String) -> Option<u16> {
        if self.connection.is_none() {
            let stream = connect(Arc::clone(&self.trust), self.port).await?;
            let (sender, connection) = handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .ok()?;
            tokio::spawn(async move { drop(connection.await) });
            self.connection = Some(sender);
        }
        let request = post(&self.token).body(full_body(body)).ok()?;
        let answer = send(self.connection.as_mut()?, request).await.ok()?;
        Some(answer.code)
    }
}
