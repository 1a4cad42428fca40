//! What the controller answers schedulers: both replicas, over plain HTTP.

use std::cell::Cell;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};

use crate::api_support::reporter::{Reporter, account, report, token, trust};
use crate::api_support::{ControlPlane, Controller, free_port, lease_namespace};

const TIMEOUT: Duration = Duration::from_mins(2);

const LINE: &str = "instance:plimsoll_load_line:ratio";

/// Sends a request; returns code and body.
fn ask(port: u16, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all((head + body).as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

fn get(port: u16, path: &str) -> (u16, String) {
    ask(port, "GET", path, "").unwrap()
}

/// A replica that accepts reports at the first port, and answers schedulers at the second.
fn replica(plane: &ControlPlane, name: &str, ports: [u16; 2]) -> Controller {
    let [reports, schedulers] = ports.map(|port| format!("127.0.0.1:{port}"));
    let args = [
        "--report-listen",
        &reports,
        "--scheduler-listen",
        &schedulers,
        "--pod-ip",
        "127.0.0.1",
    ];
    plane.controller(name, &args)
}

#[test]
fn every_replica_answers_from_the_reports_that_it_receives() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&["bare", "node00"].map(str::to_owned));
    account(&plane);
    plane.apply(&[lease_namespace()]);
    let ports = [[free_port(), free_port()], [free_port(), free_port()]];
    let _replicas =
        [("one", ports[0]), ("two", ports[1])].map(|(name, ports)| replica(&plane, name, ports));
    let (trust, token) = (trust(&plane), token(&plane, "node00"));
    let sequence = Cell::new(0);
    for [reports, schedulers] in ports {
        plane.until("it knows the nodes", TIMEOUT, |_| {
            ask(schedulers, "GET", "/watcher", "").is_some_and(|(code, body)| {
                code == 503 && body.starts_with("only 0 of 2 nodes have a recent report")
            })
        });
        plane.until("it accepts reports", TIMEOUT, |_| {
            Reporter::dial(&trust, reports).is_some()
        });
        let agent = Reporter::new(&trust, reports);
        plane.until("the node is known", TIMEOUT, |_| {
            sequence.set(sequence.get() + 1);
            drop(agent.report(&token, &report("node00", sequence.get(), 2000)));
            get(schedulers, "/watcher").0 == 200
        });
        let page: Value = serde_json::from_str(&get(schedulers, "/watcher").1).unwrap();
        let value = |node: &str, metric: usize| {
            page["data"]["NodeMetricsMap"][node]["metrics"][metric]["value"].clone()
        };
        assert_eq!(value("node00", 0), 25.2, "{page}");
        assert_eq!(value("bare", 0), 25.2, "the median: {page}");
        let query = format!("/api/v1/query?query={LINE}");
        let form = format!("query={LINE}&time=1.5");
        for answer in [
            get(schedulers, &query),
            ask(schedulers, "POST", "/api/v1/query", &form).unwrap(),
        ] {
            let body: Value = serde_json::from_str(&answer.1).unwrap();
            let result = &body["data"]["result"];
            assert_eq!(
                (answer.0, &result[1]["value"][1]),
                (200, &json!("0.315001")),
                "{body}"
            );
        }
        let (code, body) = get(schedulers, "/api/v1/query?query=up");
        assert!(
            code == 400 && body.contains("it answers only instance:plimsoll_load_line:ratio"),
            "{body}"
        );
        let long = "x".repeat(1 << 20);
        // The connection may be closed before all is sent.
        if let Some((code, body)) = ask(schedulers, "POST", "/api/v1/query", &long) {
            assert_eq!(code, 400, "{body}");
        }
        assert_eq!(get(schedulers, "/other").0, 404);
        assert_eq!(get(schedulers, "/watcher/health").0, 200);
    }
}

#[test]
fn schedulers_are_not_answered_without_reports() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["controller", "--scheduler-listen", "127.0.0.1:0"])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("--report-listen"), "{stderr}");
}
