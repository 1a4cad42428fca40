//! `PodQOS.spec.resourceQOS`: what the selected pods get at all times. The fields and their names are crane's.

use std::collections::BTreeMap;

use kube::KubeSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The `cpuPriority` whose pods are in the idle class.
pub(super) const IDLE_PRIORITY: i32 = 7;

/// What the selected pods get at all times. Fields of crane that are not listed here are accepted and not enforced.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
pub struct ResourceQos {
    /// What the pods get of the CPU.
    #[serde(rename = "cpuQOS", default, skip_serializing_if = "Option::is_none")]
    pub cpu_qos: Option<CpuQos>,
    /// What the pods get of the memory. Accepted, but not enforced.
    #[serde(rename = "memoryQOS", default, skip_serializing_if = "Option::is_none")]
    pub memory_qos: Option<MemoryQos>,
    /// What the pods get of the disks. Accepted, but not enforced.
    #[serde(rename = "diskIOQOS", default, skip_serializing_if = "Option::is_none")]
    pub disk_io_qos: Option<DiskIoQos>,
    /// Other fields of crane.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: BTreeMap<String, Value>,
}

/// The CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
pub struct CpuQos {
    /// The priority, from 0 (highest) to 7 (lowest). 7: the pods are in the idle class at all times, so they use only CPU time
    /// that no other pod wants. 0 to 6 are accepted, but not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 7))]
    pub cpu_priority: Option<i32>,
    /// The burst above the CPU limit. Accepted, but not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_burst: Option<CpuBurst>,
    /// Other fields of crane.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: BTreeMap<String, Value>,
}

/// The burst above the CPU limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
pub struct CpuBurst {
    /// The burst quota. Accepted, but not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub burst_quota: Option<String>,
}

/// The memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
pub struct MemoryQos {
    /// Where reclaim starts. Accepted, but not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_watermark: Option<MemWatermark>,
    /// Other fields of crane.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: BTreeMap<String, Value>,
}

/// Where reclaim starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
pub struct MemWatermark {
    /// In percent of the memory limit. Accepted, but not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub watermark_ratio: Option<i32>,
}

/// The disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
pub struct DiskIoQos {
    /// The limits per device. Accepted, but not enforced.
    #[serde(
        rename = "diskIOLimit",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub disk_io_limit: Option<DiskIoLimit>,
    /// The weight of the pods. Accepted, but not enforced.
    #[serde(
        rename = "diskIOWeight",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub disk_io_weight: Option<DiskIoWeight>,
    /// Other fields of crane.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: BTreeMap<String, Value>,
}

/// The limits of the disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
pub struct DiskIoLimit {
    /// Reads per second. Accepted, but not enforced.
    #[serde(rename = "readIOps", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub read_iops: Option<i64>,
    /// Writes per second. Accepted, but not enforced.
    #[serde(rename = "writeIOps", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub write_iops: Option<i64>,
    /// Bytes read per second. Accepted, but not enforced.
    #[serde(rename = "readBps", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub read_bps: Option<i64>,
    /// Bytes written per second. Accepted, but not enforced.
    #[serde(rename = "writeBps", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub write_bps: Option<i64>,
}

/// The weight at the disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
pub struct DiskIoWeight {
    /// The weight of the pods. Accepted, but not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10000))]
    pub weight: Option<i32>,
}

impl ResourceQos {
    /// Whether the pods are in the idle class.
    pub fn is_idle(&self) -> bool {
        let cpu = self.cpu_qos.as_ref();
        cpu.and_then(|cpu| cpu.cpu_priority) == Some(IDLE_PRIORITY)
    }

    /// The fields that are given and have no effect, as paths below `resourceQOS`.
    pub(super) fn unenforced(&self) -> Vec<String> {
        // All types of the schema can be serialized.
        let mut all = serde_json::to_value(self).unwrap_or_default();
        if self.is_idle()
            && let Some(cpu) = all["cpuQOS"].as_object_mut()
        {
            cpu.remove("cpuPriority");
        }
        let of = |(resource, fields): (&String, &Value)| match fields.as_object() {
            Some(fields) => fields.keys().map(|it| format!("{resource}.{it}")).collect(),
            None => vec![resource.clone()],
        };
        all.as_object().into_iter().flatten().flat_map(of).collect()
    }
}
