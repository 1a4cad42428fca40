//! `PodQOS.spec.resourceQOS`: what the selected pods get at all times. The fields and their names are crane's.

use std::collections::BTreeMap;

use kube::KubeSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::engine::quantity::Quantity;
use crate::engine::units::MilliCpu;

/// The `cpuPriority` whose pods are in the idle class.
pub const IDLE_PRIORITY: i32 = 7;

/// Declares objects of crane's API: fields that are not listed are kept, so that they can be named as not enforced.
macro_rules! objects {
    ($($(#[$object:meta])* $name:ident { $($(#[$field:meta])* $known:ident: $type:ty,)+ })+) => {
        $(
            #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
            #[serde(rename_all = "camelCase")]
            $(#[$object])*
            #[schemars(extend("x-kubernetes-preserve-unknown-fields" = true))]
            pub struct $name {
                $(
                    $(#[$field])*
                    #[serde(default, skip_serializing_if = "Option::is_none")]
                    pub $known: Option<$type>,
                )+
                /// Other fields of crane.
                #[serde(flatten)]
                #[schemars(skip)]
                pub other: BTreeMap<String, Value>,
            }
        )+
    };
}

objects! {
    /// What the selected pods get at all times. Fields of crane that are not listed here are accepted and not enforced.
    ResourceQos {
        /// What the pods get of the CPU.
        #[serde(rename = "cpuQOS")]
        cpu_qos: CpuQos,
        /// What the pods get of the memory. Accepted, but not enforced.
        #[serde(rename = "memoryQOS")]
        memory_qos: MemoryQos,
        /// What the pods get of the disks. Accepted, but not enforced.
        #[serde(rename = "diskIOQOS")]
        disk_io_qos: DiskIoQos,
    }

    /// The CPU.
    CpuQos {
        /// The priority, from 0 (highest) to 7 (lowest). 7: the pods are in the idle class at all times, so they use only CPU time
        /// that no other pod wants. 0 to 6 are accepted, but not enforced.
        #[schemars(range(min = 0, max = 7))]
        cpu_priority: i32,
        /// The burst above the CPU limit.
        cpu_burst: CpuBurst,
    }

    /// The burst above the CPU limit.
    #[x_kube(
        validation = Rule::new("!has(self.burstQuota) || self.burstQuota.matches('^([0-9]{1,6}([.][0-9]{1,3})?|[0-9]{1,9}m)$')")
            .message("burstQuota is not a number of CPUs; write for example \"500m\", or \"1\" for a whole CPU")
            .field_path(".burstQuota"),
    )]
    CpuBurst {
        /// How much unused CPU time the pod and each of its containers may save up and use above the CPU limit in a short peak, in
        /// CPUs over one enforcement period: `500m` is 50 ms per 100 ms. At most the limit. It has no effect without a limit.
        /// The largest of several `PodQOS` applies; pods with the annotation `plimsoll.dev/protected: "true"` get it, too.
        #[schemars(length(max = 64))]
        burst_quota: String,
    }

    /// The memory.
    MemoryQos {
        /// Where reclaim starts. Accepted, but not enforced.
        mem_watermark: MemWatermark,
    }

    /// Where reclaim starts.
    MemWatermark {
        /// In percent of the memory limit. Accepted, but not enforced.
        #[schemars(range(min = 0, max = 100))]
        watermark_ratio: i32,
    }

    /// The disks.
    DiskIoQos {
        /// The limits per device. Accepted, but not enforced.
        #[serde(rename = "diskIOLimit")]
        disk_io_limit: DiskIoLimit,
        /// The weight of the pods. Accepted, but not enforced.
        #[serde(rename = "diskIOWeight")]
        disk_io_weight: DiskIoWeight,
    }

    /// The limits of the disks.
    DiskIoLimit {
        /// Reads per second. Accepted, but not enforced.
        #[serde(rename = "readIOps")]
        #[schemars(range(min = 0))]
        read_iops: i64,
        /// Writes per second. Accepted, but not enforced.
        #[serde(rename = "writeIOps")]
        #[schemars(range(min = 0))]
        write_iops: i64,
        /// Bytes read per second. Accepted, but not enforced.
        #[schemars(range(min = 0))]
        read_bps: i64,
        /// Bytes written per second. Accepted, but not enforced.
        #[schemars(range(min = 0))]
        write_bps: i64,
    }

    /// The weight at the disks.
    DiskIoWeight {
        /// The weight of the pods. Accepted, but not enforced.
        #[schemars(range(min = 0, max = 10000))]
        weight: i32,
    }
}

impl ResourceQos {
    /// Whether the pods are in the idle class.
    pub fn is_idle(&self) -> bool {
        let cpu = self.cpu_qos.as_ref();
        cpu.and_then(|cpu| cpu.cpu_priority) == Some(IDLE_PRIORITY)
    }

    /// The burst of the pods; 0 without any. Validation has rejected what is no quantity.
    pub fn burst(&self) -> MilliCpu {
        let burst = self.cpu_qos.iter().flat_map(|cpu| &cpu.cpu_burst);
        let given = burst.filter_map(|burst| burst.burst_quota.as_deref());
        let quantity = given.filter_map(|text| text.parse::<Quantity>().ok()?.as_milli_cpu());
        quantity.sum()
    }

    /// The fields that are given and have no effect, as paths below `resourceQOS`.
    pub(super) fn unenforced(&self) -> Vec<String> {
        // All types of the schema can be serialized.
        let mut all = serde_json::to_value(self).unwrap_or_default();
        if let Some(cpu) = all["cpuQOS"].as_object_mut() {
            cpu.retain(|field, _| match field.as_str() {
                "cpuPriority" => !self.is_idle(),
                "cpuBurst" => self.burst() == MilliCpu::ZERO,
                _ => true,
            });
        }
        let of = |(resource, fields): (&String, &Value)| match fields.as_object() {
            Some(fields) => fields.keys().map(|it| format!("{resource}.{it}")).collect(),
            None => vec![resource.clone()],
        };
        all.as_object().into_iter().flatten().flat_map(of).collect()
    }
}
