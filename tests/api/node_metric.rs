//! The `NodeMetric` of an agent, with real cgroups of this machine's kernel.

use crate::agent_support::{Agent, HIGH, NODE, Node, closing, pod};
use plimsoll::crd::NodeMetric;
use plimsoll::engine::quantity::Quantity;

fn node_metric(agent: &Agent) -> Option<NodeMetric> {
    let (code, body) = agent.http("/v1/node-metric")?;
    assert!(code == 503 || body.len() <= 4096, "{} bytes", body.len());
    (code == 200).then(|| serde_json::from_str(&body).unwrap())
}

/// Millicores.
fn cpu(amount: Option<&k8s_openapi::apimachinery::pkg::api::resource::Quantity>) -> Option<u64> {
    let quantity: Quantity = amount?.0.parse().unwrap();
    quantity.as_milli_cpu().map(|cpu| cpu.0)
}

#[test]
fn an_agent_reports_the_load_of_its_node_and_busiest_pods() {
    let Some(mut node) = Node::new() else { return };
    node.burning_pod("busy");
    let idle = node.pod(&pod("idle", "web"));
    node.machine
        .cgroup(&format!("kubepods/besteffort/pod{idle}"));
    node.set_rules(&closing());
    let agent = node.agent(&[]);
    let known = |holds: &dyn Fn(&NodeMetric) -> bool| {
        node_metric(&agent).is_some_and(|metric| holds(&metric))
    };
    agent.until("it reports the use of the busy pod", || {
        known(&|metric| {
            let status = &metric.status;
            status.top_pods.len() == 2
                && status.top_pods[0].name == "busy"
                && cpu(status.top_pods[0].cpu.as_ref()).is_some_and(|cpu| cpu > 100)
        })
    });
    let first = node_metric(&agent).unwrap();
    assert_eq!(first.metadata.name.as_deref(), Some(NODE));
    let status = &first.status;
    assert_eq!(cpu(status.capacity.cpu.as_ref()), Some(2000));
    assert!(status.window.is_some() && status.timestamp.is_some());
    assert_eq!(status.pods, Some(2));
    assert_eq!(status.top_pods[1].name, "idle");
    assert!(status.usage.pods.memory.is_some());
    let memory = &status.usage.node.memory.as_ref().unwrap().0;
    assert_eq!(memory, "2000000Ki", "MemTotal less MemAvailable");
    assert!(status.breached.is_empty());
    let window = status.windows.cpu.as_ref().unwrap().last5m.unwrap();
    assert!(window.avg.is_none() && window.coverage < 0.5, "{window:?}");

    // A change is reported without waiting for the next regular report.
    node.machine.load.set(HIGH);
    agent.until("it reports the load and the breached rule", || {
        known(&|metric| {
            let node = cpu(metric.status.usage.node.cpu.as_ref());
            metric.status.breached == ["q/cpu"] && node.is_some_and(|cpu| cpu > 1500)
        })
    });
    let second = node_metric(&agent).unwrap();
    let sequence = |metric: &NodeMetric| metric.status.agent.as_ref().unwrap().sequence;
    assert!(sequence(&second) > sequence(&first));
    let rules = second.status.rules.unwrap();
    assert_eq!((rules.total, rules.breached), (1, 1));

    // A deleted pod is not in the report any more.
    node.plane
        .kubectl(&["delete", "pod", "idle", "--grace-period=0", "--force"]);
    agent.until("the deleted pod is not reported", || {
        known(&|metric| metric.status.pods == Some(1))
    });
    let (code, paths) = agent.http("/v1/other").unwrap();
    assert_eq!(code, 404);
    assert!(paths.contains("/v1/node-metric"), "{paths}");
}

#[test]
fn an_agent_without_a_measurement_says_so() {
    let Some(node) = Node::unregistered() else {
        return;
    };
    let agent = node.agent(&[]);
    agent.until("it answers", || agent.http("/livez").is_some());
    let (code, why) = agent.http("/v1/node-metric").unwrap();
    assert_eq!(code, 503);
    assert!(why.contains("has not been measured yet"), "{why}");
}
