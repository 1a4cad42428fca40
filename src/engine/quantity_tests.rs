#![allow(clippy::float_cmp, reason = "the values are exact")]

use super::*;
use proptest::prelude::*;

fn nanos(text: &str) -> i128 {
    text.parse::<Quantity>().unwrap().nanos()
}

#[test]
fn every_suffix_has_the_same_value_as_in_kubernetes() {
    let table: [(&str, i128); 24] = [
        ("0", 0),
        ("1", 1_000_000_000),
        ("+1", 1_000_000_000),
        ("-1", -1_000_000_000),
        ("1n", 1),
        ("1u", 1_000),
        ("100m", 100_000_000),
        ("0.5", 500_000_000),
        (".5", 500_000_000),
        ("5.", 5_000_000_000),
        ("-.5", -500_000_000),
        ("1k", 1_000_000_000_000),
        ("1M", 1_000_000 * NANOS),
        ("1G", 1_000_000_000 * NANOS),
        ("1T", 1_000_000_000_000 * NANOS),
        ("1P", 1_000_000_000_000_000 * NANOS),
        ("1E", 1_000_000_000_000_000_000 * NANOS),
        ("1Ki", 1024 * NANOS),
        ("1.5Gi", 1_610_612_736 * NANOS),
        ("1Ei", (1 << 60) * NANOS),
        ("12e6", 12_000_000 * NANOS),
        ("12E-3", 12_000_000),
        ("1e+2", 100 * NANOS),
        ("0.0000000001Gi", 107_374_183),
    ];
    for (text, expected) in table {
        assert_eq!(nanos(text), expected, "{text}");
    }
}

#[test]
fn values_finer_than_a_nano_are_rounded_away_from_zero() {
    for (text, expected) in [
        ("0.1n", 1),
        ("1.1n", 2),
        ("-1.1n", -2),
        ("0.0000000001", 1),
        ("1e-100", 1),
        ("1e-2147483648", 1),
        ("-1e-100", -1),
        ("9.0000000000000000000000000001n", 10),
    ] {
        assert_eq!(nanos(text), expected, "{text}");
    }
}

#[test]
fn values_above_the_int64_maximum_are_capped() {
    let cap = i128::from(i64::MAX) * NANOS;
    for text in [
        "9223372036854775807",
        "9223372036854775808",
        "9223372036854775807.5",
        "10E",
        "8Ei",
        "1e2147483647",
        "99999999999999999999999999999999999999999999999999",
    ] {
        assert_eq!(nanos(text), cap, "{text}");
    }
    assert_eq!(nanos("0e2147483647"), 0);
    assert_eq!(nanos("-1e30"), -cap);
}

#[test]
fn invalid_quantities_are_rejected() {
    for text in [
        "",
        " ",
        "1 ",
        " 1",
        "-",
        "+",
        ".",
        "NaN",
        "nan",
        ".nan",
        ".inf",
        "inf",
        "Infinity",
        "1.2.3",
        "--1",
        "1i",
        "1Kib",
        "1K",
        "1ki",
        "1KI",
        "1mi",
        "1e",
        "1e+",
        "1e1.5",
        "1e99999999999",
        "0x10",
        "1_000",
        "1,5",
        "Mi",
        "e3",
        "५",
        "1٣",
        "1\u{0}",
    ] {
        assert!(text.parse::<Quantity>().is_err(), "{text:?}");
    }
}

#[test]
fn error_messages_say_what_to_write() {
    let message = |text: &str| text.parse::<Quantity>().unwrap_err().to_string();
    assert!(
        message("5gb").contains("ends in \"gb\""),
        "{}",
        message("5gb")
    );
    assert!(
        message("NaN").contains("write digits"),
        "{}",
        message("NaN")
    );
    assert!(message("").contains("is empty"), "{}", message(""));
}

#[test]
fn units_are_rounded_up_as_kubernetes_does() {
    let quantity = |text: &str| text.parse::<Quantity>().unwrap();
    assert_eq!(quantity("1500m").as_milli_cpu(), Some(MilliCpu(1500)));
    assert_eq!(quantity("0.1234").as_milli_cpu(), Some(MilliCpu(124)));
    assert_eq!(quantity("-1").as_milli_cpu(), None);
    assert_eq!(quantity("1Gi").as_bytes(), Some(Bytes(1 << 30)));
    assert_eq!(quantity("100m").as_bytes(), Some(Bytes(1)));
}

#[test]
fn as_f64_returns_the_nearest_number() {
    let value = |text: &str| text.parse::<Quantity>().unwrap().as_f64();
    assert_eq!(value("0.1"), 0.1);
    assert_eq!(value("6000"), 6000.0);
    assert_eq!(value("4Gi"), 4_294_967_296.0);
    assert_eq!(value("-2.5"), -2.5);
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC*") {
        let _ = text.parse::<Quantity>();
    }

    #[test]
    fn no_number_like_text_panics(text in "[-+]?[0-9]{0,60}\\.?[0-9]{0,60}(n|u|m|k|Ki|Ei|E|e-?[0-9]{1,11})?") {
        if let Ok(quantity) = text.parse::<Quantity>() {
            prop_assert!(quantity.as_f64().is_finite());
            prop_assert!(quantity.nanos().unsigned_abs() <= CAP * NANOS.unsigned_abs());
        }
    }

    #[test]
    fn quantities_round_trip_through_text(nanos in -(i128::from(i64::MAX))..=i128::from(i64::MAX), scale in 0u32..9) {
        let quantity = Quantity { nanos: nanos * 10i128.pow(scale) };
        prop_assert_eq!(quantity.to_string().parse::<Quantity>().unwrap(), quantity);
    }

    #[test]
    fn thousandths_are_exact(whole in 0u32..1_000_000, milli in 0u32..1000) {
        let text = format!("{whole}.{milli:03}");
        let same = format!("{}m", u64::from(whole) * 1000 + u64::from(milli));
        prop_assert_eq!(text.parse::<Quantity>().unwrap(), same.parse::<Quantity>().unwrap());
    }
}
