//! `plimsoll crds`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;

use super::cluster_args::ClusterArgs;
use super::progress::ProgressLine;
use super::{duration, runtime};
use crate::clock;
use crate::cluster::client::call;
use crate::crd::{KubernetesVersion, definitions};

/// How often `--wait` asks whether the definitions are served.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Arguments of `plimsoll crds`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  Install the definitions:
    plimsoll crds | kubectl apply -f -
  Install them on a Kubernetes 1.33 cluster:
    plimsoll crds --kubernetes 1.33 | kubectl apply -f -
  Write one file per kind:
    plimsoll crds --output-dir crds
  Exit with 1 if the files there are out of date:
    plimsoll crds --check crds
  Wait until the cluster of your kubeconfig serves the definitions:
    plimsoll crds --wait --timeout 1m")]
pub struct Args {
    /// Write one file per kind into this directory, instead of printing them
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    output_dir: Option<PathBuf>,
    /// Compare with the files in this directory; exit with 1 if one differs
    #[arg(long, value_name = "DIR")]
    check: Option<PathBuf>,
    /// Kubernetes version of the cluster [default: the newest supported]. For 1.33, error messages about quantities are simpler
    #[arg(long, value_name = "VERSION", value_parser = supported)]
    kubernetes: Option<KubernetesVersion>,
    /// Wait until the API server serves all definitions, instead of printing them
    #[arg(long, conflicts_with_all = ["output_dir", "check"])]
    wait: bool,
    /// How long to wait; after it the exit status is 2
    #[arg(
        long,
        value_name = "DURATION",
        value_parser = duration::positive,
        default_value = "60s",
        requires = "wait"
    )]
    timeout: Duration,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.wait {
        return runtime::start()?.block_on(wait_until_served(args));
    }
    let files: Vec<(String, String)> = args
        .kubernetes
        .unwrap_or_default()
        .definitions()
        .iter()
        .map(|definition| Ok((file_name(definition), to_yaml(definition)?)))
        .collect::<anyhow::Result<_>>()?;
    match (&args.output_dir, &args.check) {
        (Some(dir), _) => write_all(dir, &files).map(|()| ExitCode::SUCCESS),
        (None, Some(dir)) => Ok(check_all(dir, &files)),
        (None, None) => print_all(&files),
    }
}

/// Parses a supported version.
fn supported(text: &str) -> Result<KubernetesVersion, String> {
    let oldest = KubernetesVersion::OLDEST;
    match text.parse()? {
        version if version < oldest => Err(format!("plimsoll needs Kubernetes {oldest} or later")),
        version => Ok(version),
    }
}

/// Waits until the API server serves all definitions.
async fn wait_until_served(args: &Args) -> anyhow::Result<ExitCode> {
    let client = args.cluster.connect().await?;
    let timeout = args.timeout;
    let definitions = definitions();
    let started = clock::boot_time();
    let progress = ProgressLine::new("waiting for definitions", Some(definitions.len()));
    while let Err(missing) = are_served(&client, &definitions, &progress).await {
        if clock::boot_time().since(started) >= timeout {
            let version = call(client.apiserver_version()).await.ok();
            let version = version.and_then(|it| KubernetesVersion::of(&it));
            let fix = version.unwrap_or_default().install_command();
            bail!("failed to find {missing} within {timeout:?}: {fix}");
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether all definitions are served; else the first that is not, with the API server's error if any.
async fn are_served(
    client: &Client,
    definitions: &[CustomResourceDefinition],
    progress: &ProgressLine,
) -> Result<(), String> {
    for (served, definition) in definitions.iter().enumerate() {
        progress.set(served);
        let spec = &definition.spec;
        let name = format!("{}.{}", spec.names.plural, spec.group);
        let version = spec.versions.first().map_or("", |it| &it.name);
        let version = format!("{}/{version}", spec.group);
        match call(client.list_api_group_resources(&version)).await {
            Ok(list) if list.resources.iter().any(|it| it.name == spec.names.plural) => {}
            Ok(_) => return Err(name),
            Err(error) => return Err(format!("{name} ({})", error.message())),
        }
    }
    Ok(())
}

/// As controller-gen names them: `<group>_<plural>.yaml`.
fn file_name(definition: &CustomResourceDefinition) -> String {
    let spec = &definition.spec;
    format!("{}_{}.yaml", spec.group, spec.names.plural)
}

fn to_yaml(definition: &CustomResourceDefinition) -> anyhow::Result<String> {
    let text =
        serde_saphyr::to_string(definition).context("failed to write a definition as YAML")?;
    Ok(format!(
        "# Generated by `make generate` from src/crd; edit there.\n{}\n",
        text.trim_end()
    ))
}

fn print_all(files: &[(String, String)]) -> anyhow::Result<ExitCode> {
    let documents = files.iter().map(|(_, text)| format!("---\n{text}"));
    super::print(documents.collect::<String>().as_bytes())
}

fn write_all(dir: &Path, files: &[(String, String)]) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("failed to create {}", dir.display()))?;
    for (name, text) in files {
        let path = dir.join(name);
        fs::write(&path, text).with_context(|| format!("failed to write {}", path.display()))?;
    }
    Ok(())
}

fn check_all(dir: &Path, files: &[(String, String)]) -> ExitCode {
    let mut up_to_date = true;
    for (name, text) in files {
        let path = dir.join(name);
        if fs::read_to_string(&path).ok().as_ref() != Some(text) {
            up_to_date = false;
            super::print_error(format_args!(
                "{} is not what the code generates; run: plimsoll crds --output-dir {}",
                path.display(),
                dir.display()
            ));
        }
    }
    ExitCode::from(u8::from(!up_to_date))
}
