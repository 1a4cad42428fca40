//! Requests that the tests make most often, by a client in this process: a kubectl for each costs 0.1 s of CPU.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError, mpsc};
use std::time::Duration;

use hyper::Request;
use kube::api::{DynamicObject, Patch, PatchParams, PostParams, ValidationDirective};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind, TypeMeta};
use kube::discovery::{Scope, pinned_kind};
use kube::{Api, Client, Config};
use serde_json::Value;
use tokio::runtime::Handle;

/// Runs the requests of all tests, which wait for them as they would for a kubectl.
static RUNTIME: LazyLock<Handle> = LazyLock::new(|| {
    let runtime = super::reporter::runtime();
    let handle = runtime.handle().clone();
    std::thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
    handle
});

pub struct ApiClient(Client);

impl ApiClient {
    pub fn new(kubeconfig: &Path) -> Self {
        let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
        let client = wait(async {
            let options = KubeConfigOptions::default();
            let mut config = Config::from_custom_kubeconfig(kubeconfig, &options)
                .await
                .unwrap();
            config.read_timeout = Some(Duration::from_mins(1));
            config.default_retry = false;
            Client::try_from(config).unwrap()
        });
        Self(client)
    }

    /// A client of etcd's JSON API.
    pub fn of_etcd(port: u16) -> Self {
        let address = format!("http://127.0.0.1:{port}").parse().unwrap();
        let mut config = Config::new(address);
        // Without the machine's certificate authorities: an unoptimised build reads them slowly.
        config.root_cert = Some(Vec::new());
        Self(wait(async { Client::try_from(config).unwrap() }))
    }

    pub fn post(&self, path: &str, body: &Value) -> Result<String, kube::Error> {
        let request = Request::post(path).header("Content-Type", "application/json");
        self.send(&request.body(body.to_string().into_bytes()).unwrap())
    }

    /// The body of this path.
    pub fn get(&self, path: &str) -> Result<String, kube::Error> {
        self.send(&Request::get(path).body(Vec::new()).unwrap())
    }

    /// All groups and resources, those of aggregated APIs too.
    pub fn discovery(&self) -> Result<String, kube::Error> {
        let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
        let request = Request::get("/apis").header("Accept", accept);
        self.send(&request.body(Vec::new()).unwrap())
    }

    pub fn merge_patch(&self, path: &str, body: &Value) -> Result<String, kube::Error> {
        let request = Request::patch(path)
            .header("Content-Type", "application/merge-patch+json")
            .body(body.to_string().into_bytes());
        self.send(&request.unwrap())
    }

    /// Server-side apply of an object, in namespace default unless it names another.
    pub fn apply(&self, object: &Value) -> Result<(), kube::Error> {
        let mut object: DynamicObject = serde_json::from_value(object.clone()).unwrap();
        object.metadata.managed_fields = None;
        let params = PatchParams {
            field_validation: Some(ValidationDirective::Strict),
            ..PatchParams::apply("kubectl").force()
        };
        retried(|| {
            let (client, object, params) = (self.0.clone(), object.clone(), params.clone());
            wait(async move {
                let name = object.metadata.name.clone().unwrap();
                let api = api_of(client, &object).await?;
                api.patch(&name, &params, &Patch::Apply(&object)).await?;
                Ok(())
            })
        })
    }

    /// Creates an object, in namespace default unless it names another.
    pub fn create(&self, object: &Value) -> Result<(), kube::Error> {
        let object: DynamicObject = serde_json::from_value(object.clone()).unwrap();
        retried(|| {
            let (client, object) = (self.0.clone(), object.clone());
            wait(async move {
                let api = api_of(client, &object).await?;
                api.create(&PostParams::default(), &object).await?;
                Ok(())
            })
        })
    }

    fn send(&self, request: &Request<Vec<u8>>) -> Result<String, kube::Error> {
        retried(|| {
            let (client, request) = (self.0.clone(), request.clone());
            wait(async move { client.request_text(request).await })
        })
    }
}

/// As kubectl does: an API server that has just started asks to wait.
fn retried<T>(request: impl Fn() -> Result<T, kube::Error>) -> Result<T, kube::Error> {
    for _ in 0..10 {
        match request() {
            Err(kube::Error::Api(status)) if status.code == 429 => {
                std::thread::park_timeout(Duration::from_secs(1));
            }
            answer => return answer,
        }
    }
    request()
}

/// The resources of the kinds so far: the same in all API servers of a run.
static RESOURCES: Mutex<Option<HashMap<TypeMeta, (ApiResource, Scope)>>> = Mutex::new(None);

async fn api_of(client: Client, object: &DynamicObject) -> Result<Api<DynamicObject>, kube::Error> {
    let kind = object.types.clone().unwrap();
    let known = || RESOURCES.lock().unwrap_or_else(PoisonError::into_inner);
    let found = known().get_or_insert_default().get(&kind).cloned();
    let (resource, scope) = if let Some(found) = found {
        found
    } else {
        let full = GroupVersionKind::try_from(&kind).unwrap();
        let (resource, capabilities) = pinned_kind(&client, &full).await?;
        let found = (resource, capabilities.scope);
        known().get_or_insert_default().insert(kind, found.clone());
        found
    };
    Ok(match scope {
        Scope::Cluster => Api::all_with(client, &resource),
        Scope::Namespaced => {
            let namespace = object.metadata.namespace.as_deref().unwrap_or("default");
            Api::namespaced_with(client, namespace, &resource)
        }
    })
}

fn wait<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    RUNTIME.spawn(async move { sender.send(future.await) });
    receiver.recv().unwrap()
}

/// The path of a resource by the name that kubectl knows, in namespace default, or none where only kubectl knows it.
pub fn path_of(resource: &str) -> Option<&'static str> {
    Some(match resource {
        "nwm" | "nodewatermark" => "/apis/plimsoll.dev/v1alpha1/nodewatermarks",
        "nm" => "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics",
        "nodeqos" | "nodeqoss" => "/apis/ensurance.crane.io/v1alpha1/nodeqoss",
        "podqos" => "/apis/ensurance.crane.io/v1alpha1/podqoss",
        "avoid" => "/apis/ensurance.crane.io/v1alpha1/avoidanceactions",
        "apiservice" => "/apis/apiregistration.k8s.io/v1/apiservices",
        "daemonset" => "/apis/apps/v1/namespaces/default/daemonsets",
        "node" | "nodes" => "/api/v1/nodes",
        "pod" | "pods" => "/api/v1/namespaces/default/pods",
        "events" => "/api/v1/namespaces/default/events",
        "configmap" => "/api/v1/namespaces/default/configmaps",
        "secret" => "/api/v1/namespaces/default/secrets",
        _ => return None,
    })
}
