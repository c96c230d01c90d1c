//! The text format of the journal: a record a line, each with a checksum that detects torn and damaged lines.

use sha2::{Digest as _, Sha256};

use journeyman_domain::journal::{Journal, JournalRecord};

/// Hexadecimal digits.
const CHECKSUM_CHARS: usize = 8;

pub(super) fn append_record(record: &JournalRecord, out: &mut Vec<u8>) {
    // Serializing plain data to memory cannot fail.
    let json = serde_json::to_vec(record).unwrap_or_default();
    out.extend_from_slice(checksum(&json).as_bytes());
    out.push(b' ');
    out.extend_from_slice(&json);
    out.push(b'\n');
}

fn checksum(json: &[u8]) -> String {
    let mut digits = hex::encode(Sha256::digest(json));
    digits.truncate(CHECKSUM_CHARS);
    digits
}

#[derive(Debug, Default)]
pub(crate) struct ParsedJournal {
    pub journal: Journal,
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
    if found != checksum(json).as_bytes() {
        return None;
    }
    serde_json::from_slice(json).ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use journeyman_domain::id::{Run, TaskId};
    use journeyman_domain::journal::{BootId, ClaimRecord, EntryId, Leader, ProcessRecord};
    use journeyman_domain::outcome::{ExceptionReason, Outcome};

    fn text() -> impl Strategy<Value = Box<str>> {
        "\\PC{0,12}|\"\\\\\n\u{0}".prop_map(Into::into)
    }

    fn any_record() -> impl Strategy<Value = JournalRecord> {
        let entry = || (0_u64..6).prop_map(EntryId);
        let processes = || {
            (text(), proptest::option::of(text())).prop_map(|(cookie, cgroup)| ProcessRecord {
                cookie,
                cgroup,
                leaders: Vec::new(),
            })
        };
        let claim = ("[a-zA-Z0-9_-]{1,22}", any::<u32>(), text(), proptest::option::of(processes())).prop_map(
            |(task, run, claimant, processes)| ClaimRecord {
                run: Run { task: TaskId::parse(&task).unwrap(), run },
                claimant,
                processes,
            },
        );
        let leader = (any::<i32>(), any::<u64>()).prop_map(|(pid, start_ticks)| Leader { pid, start_ticks });
        let outcome = prop_oneof![
            Just(Outcome::Completed),
            Just(Outcome::Failed),
            Just(Outcome::Exception(ExceptionReason::WorkerShutdown)),
            Just(Outcome::Exception(ExceptionReason::MalformedPayload)),
            Just(Outcome::Exception(ExceptionReason::ResourceUnavailable)),
            Just(Outcome::Exception(ExceptionReason::InternalError)),
            Just(Outcome::Exception(ExceptionReason::IntermittentTask)),
            Just(Outcome::Deferred),
        ];
        prop_oneof![
            1 => text().prop_map(|boot| JournalRecord::JournalStarted { boot: BootId(boot) }),
            4 => (entry(), claim).prop_map(|(entry, claim)| JournalRecord::Claimed { entry, claim }),
            1 => (entry(), processes()).prop_map(|(entry, processes)| JournalRecord::SidecarStarted { entry, processes }),
            2 => (entry(), leader).prop_map(|(entry, leader)| JournalRecord::ProcessStarted { entry, leader }),
            2 => (entry(), outcome).prop_map(|(entry, outcome)| JournalRecord::OutcomeDecided { entry, outcome }),
            2 => entry().prop_map(|entry| JournalRecord::Closed { entry }),
            2 => (text(), proptest::option::of(any::<u64>().prop_map(Duration::from_millis)))
                .prop_map(|(claimant, sent_at)| JournalRecord::UnreadPoll { claimant, sent_at }),
        ]
    }

    fn written(records: &[JournalRecord]) -> Vec<u8> {
        let mut out = Vec::new();
        records.iter().for_each(|record| append_record(record, &mut out));
        out
    }

    fn state(records: &[JournalRecord]) -> Journal {
        let mut journal = Journal::default();
        for record in records {
            journal.apply(record.clone());
        }
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
}
