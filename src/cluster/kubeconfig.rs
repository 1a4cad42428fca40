//! The API server's address and the credentials: from a kubeconfig, or those of the pod.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use hyper::Uri;
use kube::Config;
use kube::client::AuthError;
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError, LoadDataError};
use thiserror::Error;

use super::client::describe;

/// Which cluster to talk to, and as whom.
#[derive(Clone, Debug, Default)]
pub struct ClusterSource {
    /// The file; `None`: `KUBECONFIG` or `~/.kube/config`, else the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// A context of the kubeconfig; `None`: its current one.
    pub context: Option<String>,
}

impl ClusterSource {
    /// The current context of this kubeconfig.
    pub fn file(path: impl AsRef<Path>) -> Self {
        Self {
            kubeconfig: Some(path.as_ref().to_owned()),
            context: None,
        }
    }
}

/// Why no client could be made.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The file can't be read or is not a kubeconfig.
    #[error("failed to read the kubeconfig {}: {why}", path.display())]
    Kubeconfig {
        /// Which file.
        path: PathBuf,
        /// Why, and what to do.
        why: String,
    },
    /// The kubeconfig that `KUBECONFIG` names, or that of the home directory, is not valid.
    #[error("failed to read the kubeconfig: {0}")]
    DefaultKubeconfig(String),
    /// Neither a service account nor a kubeconfig.
    #[error(
        "failed to find an API server: there is no {}, and this is not a pod; pass --kubeconfig FILE",
        .0.display()
    )]
    NoKubeconfig(PathBuf),
    /// The pod's service account can't be used.
    #[error("failed to find an API server")]
    InCluster(#[source] InClusterError),
    /// The address is not one of HTTP.
    #[error("failed to find the API server: {0}")]
    Address(String),
    /// The program that the kubeconfig names for credentials can't be used.
    #[error("failed to get credentials for the API server: {0}")]
    Credentials(String),
    /// The client can't be set up.
    #[error("failed to set up a client for the API server")]
    Client(#[source] kube::Error),
    /// A proxy is configured, which is not supported.
    #[error(
        "failed to reach the API server through the proxy {0}: Plimsoll connects to it directly; unset proxy-url in the \
         kubeconfig, or HTTPS_PROXY"
    )]
    Proxy(Uri),
}

impl ClientError {
    /// A client could not be set up with this configuration.
    pub(super) fn set_up(error: kube::Error, config: &Config) -> Self {
        let plugin = config.auth_info.exec.as_ref();
        let plugin = plugin.and_then(|plugin| plugin.command.as_deref());
        let plugin = plugin.unwrap_or_default();
        match error {
            kube::Error::Auth(AuthError::AuthExecStart(why)) => Self::Credentials(format!(
                "{plugin} could not be run: {why}; install it, or correct the user's exec in the kubeconfig"
            )),
            kube::Error::Auth(AuthError::AuthExecRun { out, .. }) => {
                let output = String::from_utf8_lossy(&out.stderr);
                let first = output.lines().find(|line| !line.trim().is_empty());
                let first = first.map_or_else(String::new, |line| format!(": {line}"));
                Self::Credentials(format!("{plugin} failed ({}){first}", out.status))
            }
            kube::Error::Auth(AuthError::ReadTokenFile(why, path)) => Self::Credentials(format!(
                "failed to read the token file {}: {why}",
                path.display()
            )),
            other => Self::Client(other),
        }
    }
}

pub(super) async fn find(source: &ClusterSource) -> Result<Config, ClientError> {
    let path = source.kubeconfig.as_deref();
    let context = source.context.as_deref();
    let config = match path {
        Some(path) => from_file(path, context).await?,
        None => infer(context).await?,
    };
    match address_error(config.cluster_url.to_string().trim_end_matches('/')) {
        None => Ok(config),
        Some(why) => Err(match path {
            Some(path) => ClientError::Kubeconfig {
                path: path.to_owned(),
                why,
            },
            None => ClientError::Address(why),
        }),
    }
}

async fn from_file(path: &Path, context: Option<&str>) -> Result<Config, ClientError> {
    let failed = |why| ClientError::Kubeconfig {
        path: path.to_owned(),
        why,
    };
    let kubeconfig = Kubeconfig::read_from(path).map_err(|error| failed(explain(&error, None)))?;
    let config = config_of(&kubeconfig, context).await;
    config.map_err(|error| failed(explain(&error, Some((&kubeconfig, context)))))
}

async fn config_of(
    kubeconfig: &Kubeconfig,
    context: Option<&str>,
) -> Result<Config, KubeconfigError> {
    let options = KubeConfigOptions {
        context: context.map(str::to_owned),
        ..KubeConfigOptions::default()
    };
    Config::from_custom_kubeconfig(kubeconfig.clone(), &options).await
}

/// A context is one of a kubeconfig, so with one the pod's service account is not used.
async fn infer(context: Option<&str>) -> Result<Config, ClientError> {
    let kubeconfig = Kubeconfig::read();
    let config = match kubeconfig.as_ref() {
        Err(error) => Err(missing_or_invalid(error)),
        Ok(kubeconfig) => {
            let config = config_of(kubeconfig, context).await;
            config.map_err(|error| {
                ClientError::DefaultKubeconfig(explain(&error, Some((kubeconfig, context))))
            })
        }
    };
    let mut config = config.or_else(|why| match Config::incluster() {
        _ if context.is_some() => Err(why),
        Ok(config) => Ok(config),
        Err(InClusterError::ReadEnvironmentVariable(_)) => Err(why),
        Err(error) => Err(ClientError::InCluster(error)),
    })?;
    config.apply_debug_overrides();
    Ok(config)
}

fn missing_or_invalid(error: &KubeconfigError) -> ClientError {
    match error {
        KubeconfigError::ReadConfig(why, path) if why.kind() == ErrorKind::NotFound => {
            ClientError::NoKubeconfig(path.clone())
        }
        KubeconfigError::ReadConfig(why, path) => ClientError::Kubeconfig {
            path: path.clone(),
            why: why.to_string(),
        },
        error => ClientError::DefaultKubeconfig(explain(error, None)),
    }
}

/// What is wrong in a kubeconfig, and what to do, in a line.
fn explain(error: &KubeconfigError, read: Option<(&Kubeconfig, Option<&str>)>) -> String {
    match error {
        KubeconfigError::ReadConfig(why, _) => why.to_string(),
        KubeconfigError::CurrentContextNotSet => {
            "it has no current-context; name one with --context, or another file with --kubeconfig"
                .to_owned()
        }
        KubeconfigError::LoadContext(name) => match read {
            Some((kubeconfig, Some(_))) => {
                let contexts = kubeconfig.contexts.iter();
                let names: Vec<&str> = contexts.map(|it| it.name.as_str()).collect();
                format!("it has no context {name}, but {}", names.join(", "))
            }
            _ => format!("its current-context is {name}, and there is no such context in it"),
        },
        KubeconfigError::LoadClusterOfContext(name) => {
            format!("the context is of the cluster {name}, which is not in it")
        }
        KubeconfigError::ParseClusterUrl(_) => {
            let server = read.and_then(|(kubeconfig, context)| server(kubeconfig, context));
            let server = server.unwrap_or_default();
            address_error(server).unwrap_or_else(|| format!("server {server:?} is not a URL"))
        }
        KubeconfigError::LoadCertificateAuthority(LoadDataError::ReadFile(why, file))
        | KubeconfigError::LoadClientCertificate(LoadDataError::ReadFile(why, file))
        | KubeconfigError::LoadClientKey(LoadDataError::ReadFile(why, file)) => {
            format!("failed to read {}, which it names: {why}", file.display())
        }
        KubeconfigError::Parse(error) => {
            let error = error.to_string();
            let first = error.lines().next().unwrap_or_default();
            format!(
                "it is not valid YAML: {}",
                first.trim_start_matches("error: ")
            )
        }
        other => describe(other),
    }
}

/// `server` of the cluster in use.
fn server<'a>(kubeconfig: &'a Kubeconfig, context: Option<&'a str>) -> Option<&'a str> {
    let current = context.or(kubeconfig.current_context.as_deref())?;
    let mut contexts = kubeconfig.contexts.iter();
    let context = contexts.find(|it| it.name == current)?.context.as_ref()?;
    let mut clusters = kubeconfig.clusters.iter();
    let cluster = clusters.find(|it| it.name == context.cluster)?;
    cluster.cluster.as_ref()?.server.as_deref()
}

/// Why this is not the address of an API server; a client would panic without a scheme.
fn address_error(server: &str) -> Option<String> {
    let uri = server.parse::<Uri>().ok();
    let scheme = uri.as_ref().and_then(Uri::scheme_str);
    if matches!(scheme, Some("http" | "https")) {
        return None;
    }
    let meant = match server.trim_end_matches('/') {
        host if uri.is_some_and(|uri| uri.scheme().is_none() && uri.host().is_some()) => {
            format!("https://{host}")
        }
        _ => "for example https://192.0.2.1:6443".to_owned(),
    };
    Some(format!(
        "server {server:?} is not a URL with https:// or http://; write {meant}"
    ))
}

#[cfg(test)]
mod tests {
    use std::{fs, io};

    use super::*;

    /// The error with this kubeconfig, after the name of the file.
    async fn error_with(text: &str) -> String {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("config");
        fs::write(&path, text).expect("written");
        let error = find(&ClusterSource::file(&path)).await.err();
        let error = describe(&error.expect("an error"));
        let prefix = format!("failed to read the kubeconfig {}: ", path.display());
        let why = error.strip_prefix(&prefix);
        why.unwrap_or_else(|| panic!("{error}")).to_owned()
    }

    fn kubeconfig(cluster: &str) -> String {
        format!(
            "{{current-context: c, contexts: [{{name: c, context: {{cluster: k, user: u}}}}], \
             users: [{{name: u, user: {{}}}}], clusters: [{{name: k, cluster: {cluster}}}]}}"
        )
    }

    #[tokio::test]
    async fn a_server_without_a_scheme_is_an_error_with_its_value() {
        let server = |text: &str| kubeconfig(&format!("{{server: \"{text}\"}}"));
        for (given, write) in [
            ("127.0.0.1:6443", "https://127.0.0.1:6443"),
            ("/api", "for example https://192.0.2.1:6443"),
            ("ftp://127.0.0.1:6443", "for example https://192.0.2.1:6443"),
            (
                "http://user name:6443",
                "for example https://192.0.2.1:6443",
            ),
            ("", "for example https://192.0.2.1:6443"),
        ] {
            let expected =
                format!("server {given:?} is not a URL with https:// or http://; write {write}");
            assert_eq!(error_with(&server(given)).await, expected);
        }
    }

    #[tokio::test]
    async fn what_is_wrong_in_a_kubeconfig_is_said_once() {
        let without_context =
            "it has no current-context; name one with --context, or another file with --kubeconfig";
        assert_eq!(error_with("").await, without_context);
        let broken = error_with("clusters: [").await;
        assert!(
            broken.starts_with("it is not valid YAML: line 1 column"),
            "{broken}"
        );
        let other = error_with("current-context: c").await;
        let expected = "its current-context is c, and there is no such context in it";
        assert_eq!(other, expected);
        let authority = "{server: \"https://127.0.0.1:6443\", certificate-authority: /missing}";
        let expected =
            "failed to read /missing, which it names: No such file or directory (os error 2)";
        assert_eq!(error_with(&kubeconfig(authority)).await, expected);
        let missing = find(&ClusterSource::file("/missing")).await;
        assert_eq!(
            describe(&missing.expect_err("an error")),
            "failed to read the kubeconfig /missing: No such file or directory (os error 2)"
        );
    }

    #[tokio::test]
    async fn a_context_can_be_chosen() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("config");
        let text = "{current-context: a, users: [{name: u, user: {}}], contexts: [{name: a, context: {cluster: a, user: u}}, \
                    {name: b, context: {cluster: b, user: u, namespace: shop}}], clusters: [{name: a, cluster: {server: \
                    \"https://a:6443\"}}, {name: b, cluster: {server: \"https://b:6443\"}}]}";
        fs::write(&path, text).expect("written");
        let find_context = async |name: Option<&str>| {
            let target = ClusterSource {
                context: name.map(str::to_owned),
                ..ClusterSource::file(&path)
            };
            find(&target).await
        };
        let current = find_context(None).await.expect("valid");
        assert_eq!(current.cluster_url.host(), Some("a"));
        let chosen = find_context(Some("b")).await.expect("valid");
        assert_eq!(chosen.cluster_url.host(), Some("b"));
        assert_eq!(chosen.default_namespace, "shop");
        let error = find_context(Some("c")).await.expect_err("an error");
        let error = describe(&error);
        assert!(
            error.ends_with(": it has no context c, but a, b"),
            "{error}"
        );
    }

    #[test]
    fn without_any_kubeconfig_the_error_names_the_default_file() {
        let not_found = io::Error::from(ErrorKind::NotFound);
        let path = PathBuf::from("/root/.kube/config");
        let error = missing_or_invalid(&KubeconfigError::ReadConfig(not_found, path));
        assert_eq!(
            describe(&error),
            "failed to find an API server: there is no /root/.kube/config, and this is not a pod; pass --kubeconfig FILE"
        );
    }

    #[test]
    fn a_credential_plugin_that_cannot_be_run_is_named() {
        let mut config = Config::new(Uri::from_static("https://127.0.0.1:6443"));
        config.auth_info.exec =
            Some(serde_json::from_value(serde_json::json!({"command": "aws-iam"})).expect("valid"));
        let why = io::Error::from(ErrorKind::NotFound);
        let error = ClientError::set_up(kube::Error::Auth(AuthError::AuthExecStart(why)), &config);
        assert_eq!(
            describe(&error),
            "failed to get credentials for the API server: aws-iam could not be run: entity not found; install it, or \
             correct the user's exec in the kubeconfig"
        );
    }
}
