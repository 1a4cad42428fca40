//! Output for people or for programs.

use anyhow::Context as _;
use clap::ValueEnum;
use serde::Serialize;

/// Output formats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people
    #[default]
    Text,
    /// One object on one line
    Json,
    /// The same as YAML
    Yaml,
}

impl Output {
    /// The value in this format, with a line break at the end; `None`: as text.
    pub fn of(self, value: &impl Serialize) -> anyhow::Result<Option<String>> {
        Ok(match self {
            Self::Text => None,
            Self::Json => {
                let json = serde_json::to_string(value).context("failed to write JSON")?;
                Some(json + "\n")
            }
            Self::Yaml => {
                let yaml = serde_saphyr::to_string(value).context("failed to write YAML")?;
                Some(format!("---\n{}\n", yaml.trim_end()))
            }
        })
    }
}

/// Output formats of commands with tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TableOutput {
    /// For people
    #[default]
    Text,
    /// The same with more columns, even if they do not fit the terminal
    Wide,
    /// One object on one line
    Json,
    /// The same as YAML
    Yaml,
}

impl From<TableOutput> for Output {
    fn from(output: TableOutput) -> Self {
        match output {
            TableOutput::Text | TableOutput::Wide => Self::Text,
            TableOutput::Json => Self::Json,
            TableOutput::Yaml => Self::Yaml,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn yaml_and_json_have_the_same_value() {
        let value = json!({"nodes": [{"node": "worker-1", "load": 85, "notes": ["no: yes", "a\nb"], "age": null}]});
        let written = |output: Output| output.of(&value).expect("written");
        assert_eq!(written(Output::Text), None);
        let json = written(Output::Json).expect("JSON");
        assert_eq!(json.lines().count(), 1);
        assert_eq!(serde_json::from_str::<Value>(&json).expect("JSON"), value);
        let yaml = written(Output::Yaml).expect("YAML");
        assert!(yaml.starts_with("---\nnodes:\n"), "{yaml}");
        assert_eq!(serde_saphyr::from_str::<Value>(&yaml).expect("YAML"), value);
    }
}
