#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| journeyman::source::taskcluster::fuzz_tests::claim(bytes));
