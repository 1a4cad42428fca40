//! A server and a client that others wrote: redis and redis-benchmark of Debian, both in the important pod.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::park_timeout;
use std::time::Duration;

use plimsoll::clock::boot_time;
use plimsoll::scene::cgroups::SceneCgroups;
use plimsoll::scene::latency::Distribution;
use plimsoll::scene::pod::ScenePod;
use plimsoll::scene::process::LoadProcess;

use crate::figures::{Figures, SceneFigures};
use crate::round::{Ground, Meters, run_until};
use crate::scenes::Scene;
use crate::ways::{Control, Way};

pub const NAME: &str = "redis";
/// About two seconds alone. The client's loop is closed: each of its connections waits for its answer.
const REQUESTS: u32 = 200_000;
const CONNECTIONS: u32 = 16;
/// From the start of the batch pods: every way has acted.
const SETTLE: Duration = Duration::from_secs(5);

const START_TIMEOUT: Duration = Duration::from_secs(10);

/// `None` if redis is not installed.
pub fn measure(ground: &Ground, rounds: usize) -> Option<SceneFigures> {
    let server = Command::new("redis-server").arg("--version").output();
    if server.is_err() {
        println!("redis: not measured, redis-server is not installed: make protect installs it");
        return None;
    }
    let scene = Scene::burst(ground.cpus);
    let mut ways: Vec<(Way, Vec<Figures>)> =
        Way::ALL.into_iter().map(|way| (way, Vec::new())).collect();
    for _ in 0..rounds {
        for (way, of_way) in &mut ways {
            let figures = ground.undisturbed(|| round(ground, &scene, *way));
            println!("redis {}: {}", way.name(), figures.line());
            of_way.push(figures);
        }
    }
    Some(SceneFigures {
        name: NAME,
        about: format!(
            "redis-server and redis-benchmark ({CONNECTIONS} connections, {REQUESTS} GETs) in the important pod, which requests {}, \
             beside the batch pods of the scene burst. The client waits for each answer, so a slow server gets fewer requests",
            scene.important[0].request
        ),
        max_ratio: 1.1,
        must_hold: Vec::new(),
        capacity: ground.capacity() as f64,
        batch_wants: ground.capacity() as f64,
        ways,
    })
}

/// Killed on drop.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _exited = self.0.kill();
        let _exited = self.0.wait();
    }
}

fn round(ground: &Ground, scene: &Scene, way: Way) -> Figures {
    let cgroups = scene.cgroups(ground, way);
    let important = &scene.important[0];
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("redis.sock");
    let server = Command::new("redis-server")
        .args(["--port", "0", "--save", "", "--unixsocket"])
        .arg(&socket)
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .spawn();
    let server = Server(server.unwrap());
    cgroups
        .add_process(server.0.id(), &cgroups.cgroup(important))
        .unwrap();
    wait_for_server(&socket);
    let batch_pods: Vec<ScenePod> = scene.batch.iter().map(|(pod, _)| pod.clone()).collect();
    let started = boot_time();
    let batch: Vec<LoadProcess> = if way == Way::Alone {
        Vec::new()
    } else {
        let program = &ground.program;
        let pods = batch_pods.iter();
        pods.map(|pod| LoadProcess::batch(program, pod, &cgroups).unwrap())
            .collect()
    };
    let mut control = Control::start(way, ground, &cgroups, scene, &batch_pods);
    if way != Way::Alone {
        run_until(started + SETTLE, &mut control);
    }
    let mut meters = Meters::new(&cgroups, &scene.important, &batch_pods);
    let began = boot_time();
    let text = benchmark(&socket, &cgroups, important, &mut control);
    let ended = boot_time();
    let [node, important, batch_used] = meters.millicores();
    drop(batch);
    drop(control);
    Figures {
        latency: parse(&text, ended.since(began)),
        node,
        important,
        batch: batch_used,
        others: (node - important - batch_used).max(0.0),
        round: None,
    }
}

/// The client ends without a result if the server does not listen yet.
fn wait_for_server(socket: &Path) {
    let deadline = boot_time() + START_TIMEOUT;
    while let Err(error) = UnixStream::connect(socket) {
        assert!(boot_time() < deadline, "redis-server: {error}");
        park_timeout(Duration::from_millis(10));
    }
}

fn benchmark(
    socket: &Path,
    cgroups: &SceneCgroups,
    important: &ScenePod,
    control: &mut Control,
) -> String {
    let client = Command::new("redis-benchmark")
        .arg("-s")
        .arg(socket)
        .args(["-t", "get", "--csv", "-n", &REQUESTS.to_string()])
        .args(["-c", &CONNECTIONS.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut client = client.unwrap();
    cgroups
        .add_process(client.id(), &cgroups.cgroup(important))
        .unwrap();
    while client.try_wait().unwrap().is_none() {
        run_until(boot_time() + Duration::from_millis(50), control);
    }
    let output = client.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// The columns `test,rps,avg,min,p50,p95,p99,max` in milliseconds.
fn parse(csv: &str, took: Duration) -> Distribution {
    let row = csv
        .lines()
        .find(|line| line.starts_with("\"GET\""))
        .unwrap();
    let columns: Vec<f64> = row
        .split(',')
        .skip(1)
        .map(|column| column.trim_matches('"').parse().unwrap())
        .collect();
    Distribution {
        requests: REQUESTS as usize,
        unserved: 0,
        seconds: took.as_secs_f64(),
        p50_ms: columns[3],
        p90_ms: columns[4],
        p99_ms: columns[5],
        // Not reported.
        p999_ms: f64::NAN,
        max_ms: columns[6],
    }
}
