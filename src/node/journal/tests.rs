use std::sync::Mutex;

use tempfile::TempDir;

use super::*;

fn record(name: &str) -> JournalRecord {
    JournalRecord {
        uid: PodUid::from(name),
        cgroup: CgroupPath::new(&format!("batch/{name}")).unwrap(),
        target_cgroup: "".into(),
        inode: 4711,
        file: ControlFileKind::CpuMax,
        original: "max 100000".into(),
        previous: "max 100000".into(),
        ours: "20000 100000".into(),
        base: MilliCpu(400),
        ratio: 50,
        idle: false,
        rule: RuleId::from("watermarks/cpu"),
        deadline: BootTime::from_nanos(1_800_000_000_000),
    }
}

fn journal() -> (TempDir, Journal) {
    let directory = tempfile::tempdir().unwrap();
    let journal = Journal::new(directory.path()).unwrap();
    (directory, journal)
}

fn saved(records: &[JournalRecord]) -> (TempDir, Journal) {
    let (directory, journal) = journal();
    let now = BootTime::from_nanos(1);
    journal
        .save(now, records.to_vec(), &mut Effects::default())
        .unwrap();
    (directory, journal)
}

#[test]
fn saved_records_are_loaded() {
    for records in [vec![], vec![record("a")], vec![record("a"), record("b")]] {
        let (_directory, journal) = saved(&records);
        assert_eq!(journal.load().unwrap(), records);
    }
}

#[test]
fn a_missing_journal_has_no_records() {
    let (_directory, journal) = journal();
    assert_eq!(journal.load().unwrap(), []);
}

#[test]
fn a_truncated_journal_is_rejected() {
    let (_directory, journal) = saved(&[record("a"), record("b")]);
    let bytes = fs::read(journal.path()).unwrap();
    for len in 0..bytes.len() {
        fs::write(journal.path(), &bytes[..len]).unwrap();
        assert!(journal.load().is_err(), "cut to {len} bytes");
    }
}

#[test]
fn a_journal_with_a_changed_byte_is_rejected() {
    let (_directory, journal) = saved(&[record("a")]);
    let bytes = fs::read(journal.path()).unwrap();
    for index in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[index] ^= 1;
        fs::write(journal.path(), &damaged).unwrap();
        assert!(journal.load().is_err(), "byte {index}");
    }
}

#[test]
fn the_error_names_the_file_and_what_to_do() {
    let (_directory, journal) = journal();
    let cases = [
        ("", "move the journal away"),
        ("[Unit]\nDescription=x\n", "not plimsoll's"),
        (
            "plimsoll-journal 2 x 1\ncrc32 00000000\n",
            "the version of plimsoll that wrote it",
        ),
        ("plimsoll-journal 1 x 1\n", "cut short"),
        (
            "plimsoll-journal 1 x 1\ncrc32 00000000\n",
            "checksum is wrong",
        ),
    ];
    for (text, advice) in cases {
        fs::write(journal.path(), text).unwrap();
        let message = journal.load().unwrap_err().to_string();
        assert!(message.contains(advice), "{message}");
        let path = journal.path().display().to_string();
        assert!(message.contains(&path), "{message}");
    }
}

#[test]
fn a_bad_record_is_rejected_with_its_line() {
    let (_directory, journal) = journal();
    let body = "plimsoll-journal 1 x 1\n{\"uid\":\"a\"}\n";
    let sum = crc32fast::hash(body.as_bytes());
    fs::write(journal.path(), format!("{body}crc32 {sum:08x}\n")).unwrap();
    let message = journal.load().unwrap_err().to_string();
    assert!(message.contains("line 2"), "{message}");
}

#[test]
fn a_path_outside_the_cgroup_root_is_rejected() {
    let text = to_line(&record("a")).replace("batch/a", "../../etc");
    assert!(serde_json::from_str::<JournalRecord>(&text).is_err());
}

#[test]
fn the_journal_of_another_boot_is_ignored() {
    let (directory, journal) = saved(&[record("a")]);
    let other = Journal {
        path: directory.path().join("journal"),
        boot_id: "another boot".to_owned(),
    };
    assert_eq!(other.load().unwrap(), []);
    assert_eq!(journal.load().unwrap().len(), 1);
}

/// A sync may take half a minute on an overloaded disk, and the journal is void after a reboot anyway.
#[test]
fn saving_takes_no_sync() {
    let (_directory, journal) = journal();
    let steps = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&steps);
    let mut effects = Effects::watched(move |step| seen.lock().unwrap().push(step.to_owned()));
    journal
        .save(BootTime::from_nanos(1), [record("a")], &mut effects)
        .unwrap();
    let mut steps = steps.lock().unwrap().clone();
    steps.dedup();
    assert_eq!(steps, ["create", "write", "rename"]);
}

#[test]
fn a_failed_write_leaves_the_old_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state");
    write_atomic(&path, b"old").unwrap();
    fs::create_dir(directory.path().join("state.tmp")).unwrap();
    let message = write_atomic(&path, b"new").unwrap_err().to_string();
    assert!(message.starts_with("failed to create"), "{message}");
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[test]
fn a_second_process_is_rejected_with_the_holder() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state");
    let lock = StateLock::acquire(&path).unwrap();
    let message = StateLock::acquire(&path).unwrap_err().to_string();
    let pid = std::process::id();
    assert!(message.contains(&format!("process {pid}")), "{message}");
    drop(lock);
    StateLock::acquire(&path).unwrap();
}

#[test]
fn a_missing_parent_of_the_state_directory_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("no/state");
    let message = StateLock::acquire(&path).unwrap_err().to_string();
    assert!(message.contains("--state-dir"), "{message}");
}

/// Damages the journal: replaces its boot ID with `id` and cuts its end off.
fn damaged(journal: &Journal, id: &str, age: Duration) {
    let text = fs::read_to_string(journal.path()).unwrap();
    let text = text.replace(&journal.boot_id, id);
    fs::write(journal.path(), &text[..text.len() - 10]).unwrap();
    let file = fs::File::options()
        .write(true)
        .open(journal.path())
        .unwrap();
    let written = file.metadata().unwrap().modified().unwrap();
    file.set_modified(written - age).unwrap();
}

#[test]
fn a_damaged_journal_is_set_aside_only_if_from_an_earlier_boot() {
    const OTHER: &str = "1d5a3fd6-8e5c-4b42-a1cc-6f0b4b5fbf4e";
    let years = Duration::from_hours(24 * 365 * 10);
    let this = boot_id().unwrap();
    for (id, age, is_before) in [
        (OTHER, years, true),
        // The ID itself may be damaged, and the clock may have been set.
        (OTHER, Duration::ZERO, false),
        (&*this, years, false),
    ] {
        let (directory, journal) = saved(&[record("a")]);
        damaged(&journal, id, age);
        assert_eq!(journal.load().is_ok(), is_before, "{id} {age:?}");
        let aside = journal.set_aside().unwrap();
        assert_eq!(aside.is_some(), is_before, "{id} {age:?}");
        assert_eq!(journal.path().exists(), !is_before);
        assert_eq!(directory.path().join("journal.damaged").exists(), is_before);
        assert_eq!(journal.load().is_ok(), is_before);
    }
    let (_directory, journal) = saved(&[record("a")]);
    fs::write(journal.path(), [0; 300]).unwrap();
    journal.load().unwrap_err();
    let file = fs::File::options()
        .write(true)
        .open(journal.path())
        .unwrap();
    file.set_modified(UNIX_EPOCH).unwrap();
    assert_eq!(journal.load().unwrap(), []);
    // A file that is not ours stays in place.
    let (_directory, journal) = saved(&[]);
    fs::write(journal.path(), "[Unit]\n").unwrap();
    let file = fs::File::options()
        .write(true)
        .open(journal.path())
        .unwrap();
    file.set_modified(UNIX_EPOCH).unwrap();
    assert!(journal.set_aside().unwrap().is_none() && journal.load().is_err());
}
