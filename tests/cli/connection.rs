//! Commands whose API server can't be reached, or does not accept them: one line with the address or the file, and exit status 2.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::thread;

use crate::run_support::BINARY;

const COMMANDS: [&[&str]; 3] = [&["top"], &["doctor"], &["explain", "placement", "web-0"]];

/// The line that a command prints with a kubeconfig for this server.
fn error_line(command: &[&str], server: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    let text = format!(
        "{{current-context: c, contexts: [{{name: c, context: {{cluster: k, user: u}}}}], \
         users: [{{name: u, user: {{}}}}], clusters: [{{name: k, cluster: {{server: \"{server}\"}}}}]}}"
    );
    fs::write(&kubeconfig, text).unwrap();
    run(command, &kubeconfig)
}

fn run(command: &[&str], kubeconfig: &Path) -> String {
    let output = Command::new(BINARY)
        .args(command)
        .arg("--kubeconfig")
        .arg(kubeconfig)
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{command:?}: {error}");
    assert!(output.stdout.is_empty(), "{command:?}");
    assert_eq!(error.lines().count(), 1, "{command:?}: {error}");
    error.trim_end().to_owned()
}

/// The address of a server that gives every request this answer.
fn server(status: &'static str, content_type: &'static str, body: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let length = body.len();
    thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = connection.unwrap();
            let mut request = [0; 4096];
            if connection.read(&mut request).is_ok_and(|length| length > 0) {
                // The client may be gone.
                write!(
                    connection,
                    "HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
                )
                .ok();
            }
        }
    });
    address
}

#[test]
fn a_context_that_is_not_there_is_named_with_those_that_are() {
    for command in COMMANDS {
        let command = [command, &["--context", "staging"]].concat();
        let line = error_line(&command, "https://127.0.0.1:1");
        assert!(
            line.ends_with(": it has no context staging, but c"),
            "{line}"
        );
    }
}

#[test]
fn a_server_without_a_scheme_is_one_line_without_a_panic() {
    for command in COMMANDS {
        let line = error_line(command, "127.0.0.1:6443");
        let expected = "server \"127.0.0.1:6443\" is not a URL with https:// or http://; write https://127.0.0.1:6443";
        assert!(line.ends_with(expected), "{line}");
    }
}

#[test]
fn refused_credentials_are_one_line_with_the_address() {
    let status = r#"{"kind": "Status", "status": "Failure", "message": "Unauthorized", "reason": "Unauthorized", "code": 401}"#;
    let address = server("401 Unauthorized", "application/json", status);
    for command in COMMANDS {
        let line = error_line(command, &address);
        let expected = format!("{address} does not accept the credentials (401)");
        assert!(line.ends_with(&expected), "{line}");
    }
}

#[test]
fn a_web_page_is_one_line_with_the_address() {
    let address = server("200 OK", "text/html", "<html></html>");
    for command in COMMANDS {
        let line = error_line(command, &address);
        let expected = format!("{address} is not an API server: it answered with a web page (200)");
        assert!(line.ends_with(&expected), "{line}");
    }
}
