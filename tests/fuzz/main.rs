//! Replays the corpora, and goes on from them with a bounded number of random changes from a fixed seed. What this finds, and
//! what `cargo fuzz` finds (see `libfuzzer/`), goes into `fixtures/corpora` and stays there.
//!
//! `JOURNEYMAN_FUZZ_SECONDS=300` goes on that long for each target, and says how many executions there were;
//! `JOURNEYMAN_FUZZ_SEED` starts elsewhere.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::wildcard_enum_match_arm,
    reason = "a test that meets what it does not expect has to fail"
)]

mod targets;

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use journeyman::domain::jitter::Jitter;
use targets::{TARGETS, Target};

/// How many changed inputs each target is given.
const EXECUTIONS: u64 = 2_000;
/// The longest input that is made.
const BYTES_MAX: usize = 16 << 10;
/// How much processor time one input may take; what takes longer hangs a worker.
const TIME_MAX: Duration = Duration::from_secs(2);

fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/corpora").join(target);
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 5, "the corpus of {target} holds {} inputs", files.len());
    files.into_iter().map(|file| (file.clone(), fs::read(file).unwrap())).collect()
}

/// Runs a target on one input; a failure prints the input so that it can be kept.
fn execute((name, target): Target, input: &[u8], told: &str) {
    let began = processor_time();
    let survived = catch_unwind(|| target(input)).is_ok();
    assert!(survived, "{name} fails on {told}: {:?}", String::from_utf8_lossy(input));
    let taken = processor_time().saturating_sub(began);
    assert!(taken < TIME_MAX, "{name} takes {taken:?} on {told}");
}

/// That of this thread: the machine may have other things to do.
fn processor_time() -> Duration {
    rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).try_into().unwrap()
}

#[test]
fn every_input_of_the_corpora_is_taken_or_refused_in_good_order() {
    for target in TARGETS {
        for (file, input) in corpus(target.0) {
            execute(target, &input, &file.display().to_string());
        }
    }
}

#[test]
fn inputs_changed_at_random_are_too() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seconds = number("JOURNEYMAN_FUZZ_SECONDS");
    let seed = number("JOURNEYMAN_FUZZ_SEED").unwrap_or(1);
    for target in TARGETS {
        let inputs: Vec<Vec<u8>> = corpus(target.0).into_iter().map(|(_, input)| input).collect();
        let (mut dice, began, mut executions) = (Jitter::seeded(seed), Instant::now(), 0);
        let goes_on = |executions| match seconds {
            Some(seconds) => began.elapsed() < Duration::from_secs(seconds),
            None => executions < EXECUTIONS,
        };
        while goes_on(executions) {
            let input = changed(&inputs, &mut dice);
            execute(target, &input, &format!("the {executions}th change of seed {seed}"));
            executions += 1;
        }
        println!("{}: {executions} executions in {:?}, no finding", target.0, began.elapsed());
    }
}

fn below(dice: &mut Jitter, n: usize) -> usize {
    usize::try_from(dice.bits() % n.max(1) as u64).unwrap()
}

/// One of the inputs with a few changes: bytes flipped, cut, repeated, spliced with another's, or replaced by what parsers
/// stumble over.
fn changed(inputs: &[Vec<u8>], dice: &mut Jitter) -> Vec<u8> {
    const STUMBLING: [&[u8]; 24] = [
        b"\0",
        b"\xff\xfe",
        b"<",
        b">",
        b"&",
        b"]]>",
        b"<!DOCTYPE",
        b"<![CDATA[",
        b"&#0;",
        b"\"",
        b"'",
        b"{",
        b"}",
        b"[[",
        b"\\",
        b"%00",
        b"%2e%2e/",
        b"-1",
        b"18446744073709551616",
        b"1e999",
        b"\xe2\x80\xae",
        b"\n",
        b"@",
        b"{{messageId}}",
    ];
    let mut input = inputs[below(dice, inputs.len())].clone();
    for _ in 0..=below(dice, 6) {
        let at = below(dice, input.len() + 1);
        let length = below(dice, 1 + (input.len() - at).min(64));
        match below(dice, 7) {
            0 if at < input.len() => input[at] ^= 1 << below(dice, 8),
            1 => drop(input.drain(at..at + length)),
            2 => {
                let part = input[at..at + length].repeat(1 + below(dice, 8));
                input.splice(at..at, part);
            }
            3 => {
                let other = &inputs[below(dice, inputs.len())];
                let from = below(dice, other.len() + 1);
                let until = from + below(dice, 1 + (other.len() - from).min(256));
                input.splice(at..at + length, other[from..until].iter().copied());
            }
            4 => drop(input.splice(at..at + length, STUMBLING[below(dice, STUMBLING.len())].iter().copied())),
            5 => input.truncate(at),
            _ => input.insert(at, u8::try_from(below(dice, 256)).unwrap()),
        }
        input.truncate(BYTES_MAX);
    }
    input
}
