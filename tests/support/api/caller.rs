//! A client of the controller's API port.
#![allow(dead_code, reason = "each test uses its part")]

use k8s_openapi::ByteString;
use kube::{Client, Config};

/// With this certificate and key, or without. Accepts any server certificate.
pub fn client(port: u16, certificate: Option<(String, String)>) -> Client {
    let mut config = Config::new(format!("https://127.0.0.1:{port}").parse().unwrap());
    config.accept_invalid_certs = true;
    config.default_retry = false;
    if let Some((certificate, key)) = certificate {
        config.auth_info.client_certificate_data = Some(encode(certificate));
        config.auth_info.client_key_data = Some(encode(key).into());
    }
    Client::try_from(config).unwrap()
}

fn encode(pem: String) -> String {
    let encoded = serde_json::to_value(ByteString(pem.into_bytes())).unwrap();
    encoded.as_str().unwrap().to_owned()
}
