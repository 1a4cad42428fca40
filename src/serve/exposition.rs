//! The two text formats of `/metrics`: `OpenMetrics`, which the registry writes, and the older Prometheus format,
//! which is the default for clients.

use hyper::HeaderMap;
use hyper::header::ACCEPT;

/// A text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpositionFormat {
    /// `application/openmetrics-text`, 1.0.0.
    OpenMetrics,
    /// `text/plain`, 0.0.4.
    Prometheus,
}

impl ExpositionFormat {
    /// The format that the client prefers by the weights (`q`) of its `Accept` header; Prometheus by default.
    pub(super) fn accepted(headers: &HeaderMap) -> Self {
        let accept = headers.get_all(ACCEPT).iter();
        let ranges = accept.filter_map(|value| value.to_str().ok());
        let ranges = ranges.flat_map(|value| value.split(',')).filter_map(range);
        // The first one wins among equal weights.
        let best = ranges.reduce(|best, next| if next.1 > best.1 { next } else { best });
        match best {
            Some((format, weight)) if weight > 0.0 => format,
            _ => Self::Prometheus,
        }
    }

    pub(super) const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Converts `OpenMetrics` text to this format.
    pub(super) fn of(self, open_metrics: String) -> String {
        match self {
            Self::OpenMetrics => open_metrics,
            Self::Prometheus => prometheus(&open_metrics),
        }
    }
}

/// The format of a media range, and its weight.
fn range(range: &str) -> Option<(ExpositionFormat, f32)> {
    let mut parts = range.split(';').map(str::trim);
    let format = match parts.next()? {
        "application/openmetrics-text" => ExpositionFormat::OpenMetrics,
        "text/plain" | "text/*" | "*/*" => ExpositionFormat::Prometheus,
        _ => return None,
    };
    let weight = parts.find_map(|part| part.strip_prefix("q=")?.parse().ok());
    Some((format, weight.unwrap_or(1.0)))
}

/// In the Prometheus format a counter family has the name of its series, there are no UNIT and EOF lines, and the
/// types `info` and `unknown` do not exist.
fn prometheus(open_metrics: &str) -> String {
    let mut help = None;
    let lines = open_metrics.lines().filter_map(|line| {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            // The name depends on the type, which follows in the next line.
            help = rest.split_once(' ');
            return None;
        }
        let Some(family) = line.strip_prefix("# TYPE ") else {
            return (!line.starts_with('#')).then(|| format!("{line}\n"));
        };
        let (name, kind) = family.split_once(' ')?;
        let (suffix, kind) = match kind {
            "counter" => ("_total", "counter"),
            "info" => ("_info", "gauge"),
            "unknown" => ("", "untyped"),
            kind => ("", kind),
        };
        let help = help.take().filter(|(of, _)| *of == name);
        let help = help.map(|(_, help)| format!("# HELP {name}{suffix} {help}\n"));
        let help = help.unwrap_or_default();
        Some(format!("{help}# TYPE {name}{suffix} {kind}\n"))
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    #[test]
    fn a_client_gets_the_format_that_it_prefers() {
        let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        for (accept, format) in [
            (None, ExpositionFormat::Prometheus),
            (Some("*/*"), ExpositionFormat::Prometheus),
            (Some("application/json"), ExpositionFormat::Prometheus),
            (
                Some("application/openmetrics-text"),
                ExpositionFormat::OpenMetrics,
            ),
            (Some(prometheus_3), ExpositionFormat::OpenMetrics),
            (
                Some("application/openmetrics-text; q=0.2, text/plain; q=0.5"),
                ExpositionFormat::Prometheus,
            ),
            (
                Some("application/openmetrics-text; q=0"),
                ExpositionFormat::Prometheus,
            ),
        ] {
            let mut headers = HeaderMap::new();
            if let Some(accept) = accept {
                headers.insert(ACCEPT, HeaderValue::from_static(accept));
            }
            assert_eq!(ExpositionFormat::accepted(&headers), format, "{accept:?}");
        }
    }

    #[test]
    fn a_counter_family_has_the_name_of_its_series() {
        let open_metrics = "# HELP evictions Pods evicted.\n# TYPE evictions counter\nevictions_total{result=\"ok\"} 3\n\
            # HELP tick_seconds A tick.\n# TYPE tick_seconds histogram\n# UNIT tick_seconds seconds\ntick_seconds_sum 0.5\n\
            # TYPE build info\nbuild_info{version=\"1\"} 1\n# EOF\n";
        let wanted = "# HELP evictions_total Pods evicted.\n# TYPE evictions_total counter\nevictions_total{result=\"ok\"} 3\n\
            # HELP tick_seconds A tick.\n# TYPE tick_seconds histogram\ntick_seconds_sum 0.5\n\
            # TYPE build_info gauge\nbuild_info{version=\"1\"} 1\n";
        assert_eq!(
            ExpositionFormat::Prometheus.of(open_metrics.to_owned()),
            wanted
        );
        assert_eq!(
            ExpositionFormat::OpenMetrics.of(open_metrics.to_owned()),
            open_metrics
        );
    }
}
