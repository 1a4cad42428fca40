use tempfile::TempDir;

use super::*;

fn record(name: &str) -> Record {
    Record {
        uid: PodUid::from(name),
        cgroup: CgroupPath::new(&format!("batch/{name}")).unwrap(),
        lever: "".into(),
        inode: 4711,
        file: KnobFile::CpuMax,
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
    let folder = tempfile::tempdir().unwrap();
    let journal = Journal::new(folder.path()).unwrap();
    (folder, journal)
}

fn saved(records: &[Record]) -> (TempDir, Journal) {
    let (folder, journal) = journal();
    let now = BootTime::from_nanos(1);
    journal
        .save(now, records.to_vec(), &mut Effects::default())
        .unwrap();
    (folder, journal)
}

#[test]
fn what_is_saved_is_loaded() {
    for records in [vec![], vec![record("a")], vec![record("a"), record("b")]] {
        let (_folder, journal) = saved(&records);
        assert_eq!(journal.load().unwrap(), records);
    }
}

#[test]
fn no_journal_is_no_record() {
    let (_folder, journal) = journal();
    assert_eq!(journal.load().unwrap(), []);
}

#[test]
fn a_journal_cut_short_anywhere_is_refused_whole() {
    let (_folder, journal) = saved(&[record("a"), record("b")]);
    let whole = fs::read(journal.path()).unwrap();
    for len in 0..whole.len() {
        fs::write(journal.path(), &whole[..len]).unwrap();
        assert!(journal.load().is_err(), "cut to {len} bytes");
    }
}

#[test]
fn a_journal_with_any_byte_changed_is_refused_whole() {
    let (_folder, journal) = saved(&[record("a")]);
    let whole = fs::read(journal.path()).unwrap();
    for index in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[index] ^= 1;
        fs::write(journal.path(), &damaged).unwrap();
        assert!(journal.load().is_err(), "byte {index}");
    }
}

#[test]
fn the_refusal_names_the_file_and_what_to_do() {
    let (_folder, journal) = journal();
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
fn a_sound_checksum_over_a_bad_record_is_refused_with_its_line() {
    let (_folder, journal) = journal();
    let body = "plimsoll-journal 1 x 1\n{\"uid\":\"a\"}\n";
    let sum = crc32fast::hash(body.as_bytes());
    fs::write(journal.path(), format!("{body}crc32 {sum:08x}\n")).unwrap();
    let message = journal.load().unwrap_err().to_string();
    assert!(message.contains("line 2"), "{message}");
}

#[test]
fn a_path_that_leaves_the_cgroup_root_is_refused() {
    let text = line(&record("a")).replace("batch/a", "../../etc");
    assert!(serde_json::from_str::<Record>(&text).is_err());
}

#[test]
fn the_journal_of_another_boot_is_over() {
    let (folder, journal) = saved(&[record("a")]);
    let other = Journal {
        path: folder.path().join("journal"),
        boot_id: "another boot".to_owned(),
    };
    assert_eq!(other.load().unwrap(), []);
    assert_eq!(journal.load().unwrap().len(), 1);
}

#[test]
fn a_write_that_fails_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    write_atomic(&path, b"old").unwrap();
    fs::create_dir(folder.path().join("state.tmp")).unwrap();
    let message = write_atomic(&path, b"new").unwrap_err().to_string();
    assert!(message.starts_with("failed to create"), "{message}");
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[test]
fn one_process_has_a_state_directory_and_the_next_is_told_who() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let lock = StateLock::take(&path).unwrap();
    let message = StateLock::take(&path).unwrap_err().to_string();
    let pid = std::process::id();
    assert!(message.contains(&format!("process {pid}")), "{message}");
    drop(lock);
    StateLock::take(&path).unwrap();
}

#[test]
fn a_state_directory_whose_parent_is_missing_is_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no/state");
    let message = StateLock::take(&path).unwrap_err().to_string();
    assert!(message.contains("--state-dir"), "{message}");
}

/// Damages the journal: `id` in place of its boot id, and its end cut off.
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
fn a_damaged_journal_is_set_aside_only_where_it_is_of_an_earlier_boot() {
    const OTHER: &str = "1d5a3fd6-8e5c-4b42-a1cc-6f0b4b5fbf4e";
    let years = Duration::from_hours(24 * 365 * 10);
    let this = boot_id().unwrap();
    for (id, age, is_before) in [
        (OTHER, years, true),
        // The id itself may be damaged, and the clock may have been set.
        (OTHER, Duration::ZERO, false),
        (&*this, years, false),
    ] {
        let (folder, journal) = saved(&[record("a")]);
        damaged(&journal, id, age);
        assert_eq!(journal.load().is_ok(), is_before, "{id} {age:?}");
        let aside = journal.set_aside().unwrap();
        assert_eq!(aside.is_some(), is_before, "{id} {age:?}");
        assert_eq!(journal.path().exists(), !is_before);
        assert_eq!(folder.path().join("journal.damaged").exists(), is_before);
        assert_eq!(journal.load().is_ok(), is_before);
    }
    let (_folder, journal) = saved(&[record("a")]);
    fs::write(journal.path(), [0; 300]).unwrap();
    journal.load().unwrap_err();
    let file = fs::File::options()
        .write(true)
        .open(journal.path())
        .unwrap();
    file.set_modified(UNIX_EPOCH).unwrap();
    assert_eq!(journal.load().unwrap(), []);
    // What is not ours stays where it is.
    let (_folder, journal) = saved(&[]);
    fs::write(journal.path(), "[Unit]\n").unwrap();
    let file = fs::File::options()
        .write(true)
        .open(journal.path())
        .unwrap();
    file.set_modified(UNIX_EPOCH).unwrap();
    assert!(journal.set_aside().unwrap().is_none() && journal.load().is_err());
}
