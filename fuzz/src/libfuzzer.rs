//! The libFuzzer binary: the environment variable `FUZZ_TARGET` chooses what is fuzzed.
#![no_main]

use std::sync::LazyLock;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let found = fuzz::TARGETS.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("FUZZ_TARGET={name} is unknown")).1
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| TARGET(data));
