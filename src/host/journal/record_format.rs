//! The text format of the journal: a record a line, each with a checksum that detects torn and damaged lines.

use std::borrow::Cow;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::domain::id::{Run, TaskId};
use crate::domain::journal::{
    BootId, ClaimRecord, EntryId, Journal, JournalRecord, JournalTimestamp, Leader, ProcessRecord,
};
use crate::domain::outcome::{ExceptionReason, Outcome};
use crate::domain::time::Instant;

/// A journal of another version counts as damaged.
const FORMAT_VERSION: u32 = 1;
/// Hexadecimal digits.
const CHECKSUM_CHARS: usize = 8;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum JournalLine<'a> {
    Began {
        format: u32,
        #[serde(borrow)]
        boot: Cow<'a, str>,
    },
    Held {
        entry: u64,
        #[serde(borrow)]
        task: Cow<'a, str>,
        run: u32,
        #[serde(borrow)]
        claimant: Cow<'a, str>,
        #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
        cookie: Option<Cow<'a, str>>,
        #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
        cgroup: Option<Cow<'a, str>>,
    },
    Leads {
        entry: u64,
        pid: i32,
        started: u64,
    },
    Decided {
        entry: u64,
        #[serde(borrow)]
        outcome: Cow<'a, str>,
    },
    Over {
        entry: u64,
    },
    Polls {
        #[serde(borrow)]
        claimant: Cow<'a, str>,
        unread: Vec<PollTimes>,
    },
}

/// In milliseconds.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct PollTimes {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot: Option<u64>,
    wall: u64,
}

impl From<&JournalTimestamp> for PollTimes {
    fn from(stamp: &JournalTimestamp) -> Self {
        let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        Self { boot: stamp.boot.map(|at| millis(at.since_origin())), wall: millis(stamp.wall) }
    }
}

impl From<PollTimes> for JournalTimestamp {
    fn from(sent: PollTimes) -> Self {
        let boot = sent.boot.map(|millis| Instant::at(Duration::from_millis(millis)));
        Self { boot, wall: Duration::from_millis(sent.wall) }
    }
}

pub(super) fn append_record(record: &JournalRecord, out: &mut Vec<u8>) {
    let line = match record {
        JournalRecord::JournalStarted { boot } => {
            JournalLine::Began { format: FORMAT_VERSION, boot: Cow::Borrowed(&boot.0) }
        }
        JournalRecord::Claimed { entry, claim: held } => JournalLine::Held {
            entry: entry.0,
            task: Cow::Borrowed(held.run.task.as_str()),
            run: held.run.run,
            claimant: Cow::Borrowed(&held.claimant),
            cookie: held.processes.as_ref().map(|remains| Cow::Borrowed(&*remains.cookie)),
            cgroup: held.processes.as_ref().and_then(|remains| remains.cgroup.as_deref()).map(Cow::Borrowed),
        },
        JournalRecord::ProcessStarted { entry, leader } => {
            JournalLine::Leads { entry: entry.0, pid: leader.pid, started: leader.start_ticks }
        }
        JournalRecord::OutcomeDecided { entry, outcome } => {
            JournalLine::Decided { entry: entry.0, outcome: Cow::Borrowed(outcome_name(*outcome)) }
        }
        JournalRecord::Closed { entry } => JournalLine::Over { entry: entry.0 },
        JournalRecord::UnreadPolls { claimant, unread } => JournalLine::Polls {
            claimant: Cow::Borrowed(claimant),
            unread: unread.iter().map(PollTimes::from).collect(),
        },
    };
    let start = out.len();
    out.extend_from_slice(&[b' '; CHECKSUM_CHARS + 1]);
    // Serializing plain data to memory cannot fail.
    drop(serde_json::to_writer(&mut *out, &line));
    let sum = checksum(out.get(start + CHECKSUM_CHARS + 1..).unwrap_or_default());
    if let Some(digits) = out.get_mut(start..start + CHECKSUM_CHARS) {
        digits.copy_from_slice(&sum);
    }
    out.push(b'\n');
}

fn checksum(bytes: &[u8]) -> [u8; CHECKSUM_CHARS] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digest = Sha256::digest(bytes);
    let nibbles = digest.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    let mut sum = [b'0'; CHECKSUM_CHARS];
    for (digits, nibble) in sum.iter_mut().zip(nibbles) {
        *digits = DIGITS.get(usize::from(nibble)).copied().unwrap_or(b'0');
    }
    sum
}

#[derive(Debug, Default)]
pub(crate) struct ParsedJournal {
    pub(crate) journal: Journal,
    /// Line numbers.
    pub(crate) damaged_lines: Vec<usize>,
    #[cfg(test)]
    pub(crate) record_count: usize,
}

/// Ignores an incomplete last line, which the worker was writing when it was killed. Skips other unreadable lines.
pub(crate) fn parse_journal(bytes: &[u8]) -> ParsedJournal {
    let mut parsed = ParsedJournal::default();
    for (number, line) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let Some(line) = line.strip_suffix(b"\n") else { continue };
        match parse_record(line) {
            Some(record) => {
                parsed.journal.apply(record);
                #[cfg(test)]
                {
                    parsed.record_count += 1;
                }
            }
            None => parsed.damaged_lines.push(number + 1),
        }
    }
    parsed
}

fn parse_record(line: &[u8]) -> Option<JournalRecord> {
    let (found, rest) = line.split_at_checked(CHECKSUM_CHARS)?;
    let json = rest.strip_prefix(b" ")?;
    if found != checksum(json) {
        return None;
    }
    Some(match serde_json::from_slice(json).ok()? {
        JournalLine::Began { format: FORMAT_VERSION, boot } => {
            JournalRecord::JournalStarted { boot: BootId(boot.into()) }
        }
        JournalLine::Began { .. } => return None,
        JournalLine::Held { entry, task, run, claimant, cookie, cgroup } => {
            let cgroup = cgroup.map(Into::into);
            let remains = cookie.map(|cookie| ProcessRecord { cookie: cookie.into(), cgroup, leaders: Vec::new() });
            let run = Run { task: TaskId::parse(&task)?, run };
            JournalRecord::Claimed {
                entry: EntryId(entry),
                claim: ClaimRecord { run, claimant: claimant.into(), processes: remains },
            }
        }
        JournalLine::Leads { entry, pid, started } => {
            JournalRecord::ProcessStarted { entry: EntryId(entry), leader: Leader { pid, start_ticks: started } }
        }
        JournalLine::Decided { entry, outcome } => JournalRecord::OutcomeDecided {
            entry: EntryId(entry),
            outcome: OUTCOMES.into_iter().find(|one| outcome_name(*one) == outcome)?,
        },
        JournalLine::Over { entry } => JournalRecord::Closed { entry: EntryId(entry) },
        JournalLine::Polls { claimant, unread } => JournalRecord::UnreadPolls {
            claimant: claimant.into(),
            unread: unread.into_iter().map(JournalTimestamp::from).collect(),
        },
    })
}

const OUTCOMES: [Outcome; 7] = [
    Outcome::Completed,
    Outcome::Failed,
    Outcome::Exception(ExceptionReason::WorkerShutdown),
    Outcome::Exception(ExceptionReason::MalformedPayload),
    Outcome::Exception(ExceptionReason::ResourceUnavailable),
    Outcome::Exception(ExceptionReason::InternalError),
    Outcome::Exception(ExceptionReason::IntermittentTask),
];

const fn outcome_name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Failed => "failed",
        Outcome::Exception(reason) => reason.as_str(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text() -> impl Strategy<Value = Box<str>> {
        "\\PC{0,12}|\"\\\\\n\u{0}".prop_map(Into::into)
    }

    fn any_record() -> impl Strategy<Value = JournalRecord> {
        let entry = || (0_u64..6).prop_map(EntryId);
        let remains = (text(), proptest::option::of(text())).prop_map(|(cookie, cgroup)| ProcessRecord {
            cookie,
            cgroup,
            leaders: Vec::new(),
        });
        let held = ("[a-zA-Z0-9_-]{1,22}", any::<u32>(), text(), proptest::option::of(remains)).prop_map(
            |(task, run, claimant, remains)| ClaimRecord {
                run: Run { task: TaskId::parse(&task).unwrap(), run },
                claimant,
                processes: remains,
            },
        );
        let stamp = (proptest::option::of(0..u64::MAX / 2), 0..u64::MAX / 2)
            .prop_map(|(boot, wall)| PollTimes { boot, wall }.into());
        let leader = (any::<i32>(), any::<u64>()).prop_map(|(pid, started)| Leader { pid, start_ticks: started });
        prop_oneof![
            1 => text().prop_map(|boot| JournalRecord::JournalStarted { boot: BootId(boot) }),
            4 => (entry(), held).prop_map(|(entry, held)| JournalRecord::Claimed { entry, claim: held }),
            2 => (entry(), leader).prop_map(|(entry, leader)| JournalRecord::ProcessStarted { entry, leader }),
            2 => (entry(), proptest::sample::select(OUTCOMES.to_vec()))
                .prop_map(|(entry, outcome)| JournalRecord::OutcomeDecided { entry, outcome }),
            2 => entry().prop_map(|entry| JournalRecord::Closed { entry }),
            2 => (text(), proptest::collection::vec(stamp, 0..3))
                .prop_map(|(claimant, unread)| JournalRecord::UnreadPolls { claimant, unread }),
        ]
    }

    fn written(records: &[JournalRecord]) -> Vec<u8> {
        let mut out = Vec::new();
        records.iter().for_each(|record| append_record(record, &mut out));
        out
    }

    fn state(records: &[JournalRecord]) -> Journal {
        let mut journal = Journal::default();
        records.iter().cloned().for_each(|record| journal.apply(record));
        journal
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        #[test]
        fn written_records_are_read(records in proptest::collection::vec(any_record(), 0..20)) {
            let parsed = parse_journal(&written(&records));
            prop_assert_eq!(parsed.journal, state(&records));
            prop_assert!(parsed.damaged_lines.is_empty());
        }

        #[test]
        fn a_compacted_journal_has_the_same_state(records in proptest::collection::vec(any_record(), 0..20)) {
            let journal = state(&records);
            prop_assert_eq!(parse_journal(&written(&journal.compacted())).journal, journal);
        }

        #[test]
        fn a_torn_journal_has_the_state_of_its_complete_lines(
            records in proptest::collection::vec(any_record(), 1..20),
            at in any::<proptest::sample::Index>(),
        ) {
            let bytes = written(&records);
            let torn = &bytes[..at.index(bytes.len())];
            let complete = torn.iter().filter(|byte| **byte == b'\n').count();
            let parsed = parse_journal(torn);
            prop_assert_eq!(parsed.journal, state(&records[..complete]));
            prop_assert!(parsed.damaged_lines.is_empty(), "a torn last line is not damage");
        }

        #[test]
        fn a_damaged_byte_loses_only_its_lines_and_is_detected(
            records in proptest::collection::vec(any_record(), 1..20),
            at in any::<proptest::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut bytes = written(&records);
            let at = at.index(bytes.len());
            prop_assume!(bytes[at] != byte);
            bytes[at] = byte;
            let parsed = parse_journal(&bytes);
            prop_assert!(parsed.record_count + 2 >= records.len(), "{} of {}", parsed.record_count, records.len());
            prop_assert!(parsed.record_count < records.len() || at + 1 == bytes.len());
            prop_assert!(!parsed.damaged_lines.is_empty() || at + 1 == bytes.len());
        }

        #[test]
        fn arbitrary_bytes_are_parsed(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            parse_journal(&bytes);
        }
    }

    #[test]
    fn a_line_is_readable_json() {
        let held = ClaimRecord {
            run: Run { task: TaskId::parse("fN1SbArXTPSVFNUvaOlinQ").unwrap(), run: 2 },
            claimant: "https://tc.example.com/api/queue/v1 proj/ci eu/host-7".into(),
            processes: Some(ProcessRecord { cookie: "c0".into(), cgroup: None, leaders: Vec::new() }),
        };
        let line = String::from_utf8(written(&[JournalRecord::Claimed { entry: EntryId(7), claim: held }])).unwrap();
        let json = r#"{"held":{"entry":7,"task":"fN1SbArXTPSVFNUvaOlinQ","run":2,"claimant":"https://tc.example.com/api/queue/v1 proj/ci eu/host-7","cookie":"c0"}}"#;
        assert_eq!(line[9..], format!("{json}\n"));
    }

    #[test]
    fn a_journal_of_another_format_counts_as_damaged() {
        let mut bytes = written(&[JournalRecord::JournalStarted { boot: BootId("b".into()) }]);
        let json = r#"{"began":{"format":2,"boot":"b"}}"#;
        bytes.extend_from_slice(&checksum(json.as_bytes()));
        bytes.extend_from_slice(format!(" {json}\n").as_bytes());
        assert_eq!(parse_journal(&bytes).damaged_lines, [2]);
    }
}
