use std::fs;
use std::os::unix::fs::symlink;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use time::{Duration, OffsetDateTime};

use super::*;
use crate::cluster::client::describe;

const BOTH: [ExtendedKeyUsagePurpose; 2] = [
    ExtendedKeyUsagePurpose::ServerAuth,
    ExtendedKeyUsagePurpose::ClientAuth,
];
const METRICS: &str = "plimsoll-metrics.plimsoll.svc";
const REPORT: &str = "plimsoll-report.plimsoll.svc";

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// A certificate issuer.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        Self::of(None)
    }

    /// Signed by another authority.
    fn of(parent: Option<&Self>) -> Self {
        let mut params = CertificateParams::default();
        let name = parent.map_or("a", |_| "b");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_before = OffsetDateTime::UNIX_EPOCH;
        let key = KeyPair::generate().unwrap();
        let certificate = match parent {
            Some(parent) => params.signed_by(&key, &parent.issuer),
            None => params.self_signed(&key),
        };
        Self {
            pem: certificate.unwrap().pem(),
            issuer: Issuer::new(params, key),
        }
    }

    /// A certificate and its key.
    fn issue(
        &self,
        names: &[&str],
        usages: &[ExtendedKeyUsagePurpose],
        from: i64,
        until: i64,
    ) -> (String, String) {
        let names = names.iter().map(|name| (*name).to_owned());
        let mut params = CertificateParams::new(names.collect::<Vec<_>>()).unwrap();
        params.extended_key_usages = usages.to_vec();
        let time = |second| OffsetDateTime::UNIX_EPOCH + Duration::seconds(second);
        (params.not_before, params.not_after) = (time(from), time(until));
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    fn good(&self, from: i64, until: i64) -> (String, String) {
        self.issue(&[METRICS, REPORT], &BOTH, from, until)
    }
}

/// A directory as the kubelet mounts it: one directory per version, and a symlink that is replaced.
struct Mounted {
    directory: tempfile::TempDir,
    files: CertificateFiles,
    versions: u32,
}

impl Mounted {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name| directory.path().join(name);
        let files = TlsFiles {
            certificate: path("tls.crt"),
            key: path("tls.key"),
            authorities: path("ca.crt"),
        };
        let names = vec![METRICS.to_owned(), REPORT.to_owned()];
        Self {
            files: CertificateFiles::new(files, names),
            directory,
            versions: 0,
        }
    }

    /// `None`: the file does not exist.
    fn publish(&mut self, pair: &(String, String), authorities: Option<&str>) {
        self.versions += 1;
        let directory = self.directory.path();
        let data = directory.join(format!("..{}", self.versions));
        fs::create_dir(&data).unwrap();
        let files = [
            ("tls.crt", Some(pair.0.as_str())),
            ("tls.key", Some(&pair.1)),
            ("ca.crt", authorities),
        ];
        for (name, text) in files {
            if let Some(text) = text {
                fs::write(data.join(name), text).unwrap();
            }
            let visible = directory.join(name);
            if visible.symlink_metadata().is_err() {
                symlink(Path::new("..data").join(name), visible).unwrap();
            }
        }
        let (next, link) = (directory.join("..data_tmp"), directory.join("..data"));
        symlink(&data, &next).unwrap();
        fs::rename(next, link).unwrap();
    }

    /// The error at this second, or empty.
    fn refresh(&mut self, second: i64) -> String {
        let outcome = self.files.refresh(at(second));
        let directory = self.directory.path().display().to_string();
        let why = outcome.map_or_else(|error| describe(&error), |()| String::new());
        why.replace(&directory, "")
    }

    fn served(&self) -> Vec<CertificateDer<'static>> {
        self.files.current().unwrap().pair.chain.clone()
    }
}

fn chain(pem: &str) -> Vec<CertificateDer<'static>> {
    certificates(pem.as_bytes()).unwrap()
}

#[test]
fn a_new_certificate_is_served_after_both_authorities_are_published() {
    let (old, new) = (Authority::new(), Authority::new());
    let (first, second) = (old.good(0, 1_000_000), new.good(0, 2_000_000));
    let mut mounted = Mounted::new();
    mounted.publish(&first, Some(&old.pem));
    assert!(mounted.files.has_changed(at(10)));
    assert_eq!(mounted.refresh(10), "");
    assert!(!mounted.files.has_changed(at(11)), "nothing has changed");
    let current = mounted.files.current().unwrap();
    assert_eq!(
        (current.expires, current.roots),
        (at(1_000_000), chain(&old.pem)),
        "it expires with the certificate"
    );
    mounted.publish(&second, Some(&new.pem));
    assert!(mounted.files.has_changed(at(20)));
    assert_eq!(mounted.refresh(20), "");
    assert_eq!(mounted.served(), chain(&first.0));
    let both = [chain(&old.pem), chain(&new.pem)].concat();
    assert_eq!(mounted.files.current().unwrap().roots, both);
    assert!(!mounted.files.has_changed(at(319)));
    assert!(mounted.files.has_changed(at(320)), "it is due");
    assert_eq!(mounted.refresh(320), "");
    assert_eq!(mounted.served(), chain(&second.0));
    assert_eq!(mounted.files.current().unwrap().expires, at(2_000_000));
}

/// Certificate and key, `ca.crt` (`None`: no file), and the error at second 20.
type Case = ((String, String), Option<String>, String);

/// Files with wrong content.
fn wrong_files(ours: &Authority, good: &(String, String)) -> Vec<Case> {
    let authority = || Some(ours.pem.clone());
    let (certificate, key) = good.clone();
    let no_authority = |why| {
        format!(
            "failed to read /ca.crt: {why}; the issuer of the certificate must provide its authority there"
        )
    };
    vec![
        (
            (certificate.clone(), ours.good(0, 9000).1),
            authority(),
            "failed to use the key in /tls.key: it does not match the certificate in /tls.crt"
                .to_owned(),
        ),
        (
            (certificate, "no key".to_owned()),
            authority(),
            "failed to read /tls.key: it contains no private key in PEM".to_owned(),
        ),
        (
            ("no certificate".to_owned(), key),
            authority(),
            "failed to read /tls.crt: it contains no certificate in PEM".to_owned(),
        ),
        (
            good.clone(),
            None,
            no_authority("No such file or directory (os error 2)"),
        ),
        (
            good.clone(),
            Some(String::new()),
            no_authority("it contains no certificate in PEM"),
        ),
    ]
}

/// Certificates that clients or replicas would reject.
fn wrong_certificates(ours: &Authority) -> Vec<Case> {
    let both = [METRICS, REPORT];
    let cases = [
        (
            ours.good(0, 19),
            "it expired at 1970-01-01T00:00:19Z and was not renewed".to_owned(),
        ),
        (
            ours.good(60, 9000),
            "it is not valid before 1970-01-01T00:01:00Z; is the clock of this machine right?".to_owned(),
        ),
        (
            Authority::new().good(0, 9000),
            "no authority in /ca.crt has signed it".to_owned(),
        ),
        (
            ours.issue(&both, &BOTH[..1], 0, 9000),
            "it is not valid for clients, which replicas need among themselves; issue it for the usages \"server auth\" and \
             \"client auth\""
                .to_owned(),
        ),
        (
            ours.issue(&[METRICS, "other.plimsoll.svc"], &BOTH, 0, 9000),
            format!(
                "invalid peer certificate: certificate not valid for name \"{REPORT}\"; certificate is only valid for \
                 DnsName(\"{METRICS}\") or DnsName(\"other.plimsoll.svc\")"
            ),
        ),
    ];
    let of = |says| format!("failed to use the certificate in /tls.crt: {says}");
    let cases = cases.into_iter();
    cases
        .map(|(pair, says)| (pair, Some(ours.pem.clone()), of(says)))
        .collect()
}

#[test]
fn an_unusable_certificate_is_explained_and_the_last_good_one_served() {
    let ours = Authority::new();
    let good = ours.good(0, 1_000_000);
    let mut mounted = Mounted::new();
    assert_eq!(
        mounted.refresh(10),
        "failed to read /tls.crt: No such file or directory (os error 2)"
    );
    mounted.publish(&good, Some(&ours.pem));
    assert_eq!(mounted.refresh(10), "");
    for (pair, authorities, says) in [wrong_files(&ours, &good), wrong_certificates(&ours)].concat()
    {
        mounted.publish(&pair, authorities.as_deref());
        assert_eq!(mounted.refresh(20), says);
        assert!(
            !mounted.files.has_changed(at(20)),
            "it is not read again immediately"
        );
        assert_eq!(mounted.refresh(30), says, "the error is repeated");
        mounted.refresh(100_000);
        mounted.publish(&good, Some(&ours.pem));
        assert_eq!(mounted.refresh(100_001), "", "it is valid again");
        assert_eq!(mounted.served(), chain(&good.0), "{says}");
    }
}

#[test]
fn a_certificate_is_used_within_its_validity_only() {
    let ours = Authority::new();
    let mut mounted = Mounted::new();
    mounted.publish(&ours.good(100, 200), Some(&ours.pem));
    assert!(mounted.refresh(50).contains("it is not valid before"));
    assert!(mounted.files.current().is_none());
    assert_eq!(mounted.refresh(100), "");
    assert_eq!(mounted.refresh(199), "");
    let ended = "failed to use the certificate in /tls.crt: it expired at 1970-01-01T00:03:20Z and was not renewed";
    assert_eq!(mounted.refresh(200), ended);
    assert!(
        mounted.files.current().is_some(),
        "an expired certificate is better than none"
    );
    // With nothing valid left, the next one is served immediately.
    let next = ours.good(0, 9000);
    mounted.publish(&next, Some(&ours.pem));
    mounted.refresh(210);
    assert_eq!(mounted.refresh(210), "");
    assert_eq!(mounted.served(), chain(&next.0));
}

#[test]
fn a_certificate_may_come_with_an_intermediate_authority() {
    let root = Authority::new();
    let between = Authority::of(Some(&root));
    let (certificate, key) = between.good(0, 1_000_000);
    let mut mounted = Mounted::new();
    let whole = format!("{certificate}{}", between.pem);
    mounted.publish(&(whole, key.clone()), Some(&root.pem));
    assert_eq!(mounted.refresh(10), "");
    assert_eq!(mounted.served().len(), 2);
    mounted.publish(&(certificate, key), Some(&root.pem));
    assert!(
        mounted
            .refresh(10)
            .ends_with("no authority in /ca.crt has signed it")
    );
}
