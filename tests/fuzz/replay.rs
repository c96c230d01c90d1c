//! Replays the fuzzing corpora, and random changes of them from a fixed seed. Findings of this test and of `cargo fuzz`
//! (see `libfuzzer/`) are added to `fixtures/corpora`.
//!
//! `JOURNEYMAN_FUZZ_SECONDS=300` fuzzes each target that long and prints the number of executions; `JOURNEYMAN_FUZZ_SEED`
//! sets the seed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::wildcard_enum_match_arm,
    reason = "a test fails by panicking"
)]

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The name of a target, which is that of its corpus, and its function.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// Changed inputs per target.
const EXECUTIONS: u64 = 2_000;
const BYTES_MAX: usize = 16 << 10;
/// CPU time that one input may take.
const TIME_MAX: Duration = Duration::from_secs(2);

fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    // The crate that reads it stands at the root or below it.
    let mut places = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|place| place.join("fixtures/corpora"));
    let folder = places.find(|place| place.is_dir()).unwrap().join(target);
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 5, "the corpus of {target} holds {} inputs", files.len());
    files.into_iter().map(|file| (file.clone(), fs::read(file).unwrap())).collect()
}

/// Runs a target on one input; a failure prints the input.
fn execute((name, target): Target, input: &[u8], origin: &str) {
    let began = processor_time();
    let survived = catch_unwind(|| target(input)).is_ok();
    assert!(survived, "{name} fails on {origin}: {:?}", String::from_utf8_lossy(input));
    let taken = processor_time().saturating_sub(began);
    assert!(taken < TIME_MAX, "{name} takes {taken:?} on {origin}");
}

/// CPU time of this thread, which other load does not affect.
fn processor_time() -> Duration {
    rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).try_into().unwrap()
}

/// Runs each target on its corpus, and then on random changes of it.
pub(crate) fn run(targets: &[Target]) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seconds = number("JOURNEYMAN_FUZZ_SECONDS");
    let seed = number("JOURNEYMAN_FUZZ_SEED").unwrap_or(1);
    for target in targets.iter().copied() {
        let corpus = corpus(target.0);
        for (file, input) in &corpus {
            execute(target, input, &file.display().to_string());
        }
        let inputs: Vec<Vec<u8>> = corpus.into_iter().map(|(_, input)| input).collect();
        let (mut dice, began, mut executions) = (Dice(seed), Instant::now(), 0);
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

/// A linear congruential generator: the same seed makes the same changes.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 16
    }
}

fn below(dice: &mut Dice, n: usize) -> usize {
    usize::try_from(dice.roll() % n.max(1) as u64).unwrap()
}

/// An input with random changes: bytes flipped, cut, repeated, spliced with another input, or replaced by special tokens.
fn changed(inputs: &[Vec<u8>], dice: &mut Dice) -> Vec<u8> {
    const SPECIAL_TOKENS: [&[u8]; 24] = [
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
            4 => drop(input.splice(at..at + length, SPECIAL_TOKENS[below(dice, SPECIAL_TOKENS.len())].iter().copied())),
            5 => input.truncate(at),
            _ => input.insert(at, u8::try_from(below(dice, 256)).unwrap()),
        }
        input.truncate(BYTES_MAX);
    }
    input
}
