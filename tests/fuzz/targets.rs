//! The fuzz targets: functions of bytes that check invariants.

use std::path::Path;
use std::time::Duration;

use base64::engine::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use journeyman::config::{self, Document, Environment, show};
use journeyman::domain::claim::{self, ClaimAction, ClaimEvent, UploadStatus};
use journeyman::domain::host_health::ProbeResult;
use journeyman::domain::id::{LocalToken, Run, ServiceId, SourceId, TaskId};
use journeyman::domain::outcome::{ExceptionReason, ExecuteFailure, Outcome, PrepareFailure};
use journeyman::domain::poll::{self, Capabilities};
use journeyman::domain::refusal::Refusal;
use journeyman::domain::service_supervisor::ServiceAvailability;
use journeyman::domain::time::Instant;
use journeyman::domain::worker::{
    Effect, Event, ExitPolicy, GrantedClaim, MinResources, OnTerminationNotice, OpenResult, PollResult,
    ReceivedMessage, RecoveredClaim, RecoveryResult, SourceSpec, Worker, WorkerPolicy,
};
use journeyman::limits::{REDACT_PIECE_BYTES_MAX, REDACT_SECRET_CHARS_MIN};
use journeyman::redact::{Patterns, RedactFilter, SecretSet};
use journeyman::source::taskcluster::fuzz_targets;

/// The name of a target, which is that of its corpus, and its function.
pub(crate) type Target = (&'static str, fn(&[u8]));

pub(crate) const TARGETS: [Target; 7] = [
    ("poll_answer", fuzz_targets::poll_response),
    ("message_text", fuzz_targets::message_text),
    ("claim", fuzz_targets::claim),
    ("signed_url", fuzz_targets::signed_url),
    ("configuration", configuration),
    ("worker_events", worker_events),
    ("secrets", secrets),
];

/// A configuration file is accepted and printed, or rejected with messages.
pub(crate) fn configuration(bytes: &[u8]) {
    let document = Document::new(Path::new("fuzz.toml"), &String::from_utf8_lossy(bytes));
    match config::load(Some(document), &Environment::from_pairs(&[]), &[]) {
        Ok(loaded) => {
            let shown = show::to_toml(&loaded, show::ShowOrigins::No);
            let again = Document::new(Path::new("again.toml"), &shown);
            assert!(config::load(Some(again), &Environment::from_pairs(&[]), &[]).is_ok(), "{shown}");
        }
        Err(problems) => assert!(!problems.to_string().is_empty()),
    }
}

/// A log with a secret, verbatim and in wrapped base64. The first bytes choose the length of the secret, the line length, the
/// line ends and the cuts; then follow the secret and its surroundings. The filter must remove the secret, independent of the
/// cuts.
pub(crate) fn secrets(bytes: &[u8]) {
    let [length, width, manner, cut, rest @ ..] = bytes else { return };
    let (secret, around) = rest.split_at((usize::from(*length) * 8).min(rest.len()));
    let secret = String::from_utf8_lossy(secret);
    let secret = secret.trim();
    let (before, after) = around.split_at(around.len() / 2);
    let engine = if manner & 1 == 0 { &STANDARD } else { &URL_SAFE };
    let line_end = ["\n", "\r\n", "\r", ""][usize::from(manner >> 1 & 3)];
    let width = usize::from(*width).max(1);
    let end_of = |place: usize| if (place + 1).is_multiple_of(width) { line_end } else { "" };
    let broken = |(place, character): (usize, char)| format!("{character}{}", end_of(place));
    let characters: Vec<String> =
        engine.encode([before, secret.as_bytes(), after].concat()).chars().enumerate().map(broken).collect();
    // The characters that encode only the secret; a short one may have none.
    let own = (before.len() * 8).div_ceil(6)..(before.len() + secret.len()) * 8 / 6;
    let encoded = characters.get(own).unwrap_or_default().concat();
    let log = [before, secret.as_bytes(), after, characters.concat().as_bytes(), b"|"].concat();

    let mut set = SecretSet::new(if manner & 8 == 0 { Patterns::Included } else { Patterns::Excluded });
    set.add(secret);
    let filtered = |piece: usize| {
        let (mut filter, mut out) = (RedactFilter::default(), Vec::new());
        for piece in log.chunks(piece.max(1)) {
            filter.push(&[&set], piece, &mut out);
            assert!(filter.held_back() < REDACT_PIECE_BYTES_MAX, "{} bytes are held back", filter.held_back());
        }
        filter.finish(&[&set], &mut out);
        out
    };
    let out = filtered(log.len());
    assert_eq!(out, filtered(usize::from(*cut)), "the cuts make a difference");
    if secret.chars().count() >= REDACT_SECRET_CHARS_MIN {
        for text in [secret, encoded.trim_end()] {
            let shown = out.windows(text.len()).any(|part| part == text.as_bytes());
            assert!(!shown || "[redacted]".contains(text), "{text} is shown");
        }
    }
}

const CAPACITY: u32 = 3;
/// Effects of one event; an endless loop would cause more.
const EFFECTS_MAX: usize = 1_000;

/// Events of a worker: each byte chooses a call to answer, a command, or time to pass; the next bytes are its details.
pub(crate) fn worker_events(bytes: &[u8]) {
    let mut world = World::new(bytes);
    while let Some(choice) = world.bytes.next() {
        let event = match choice {
            0..=159 if !world.calls.is_empty() => world.answer(choice),
            0..=219 => {
                let step = Duration::from_millis(world.number() * 137);
                let later = world.now.plus(step);
                world.now = world.worker.next_deadline().map_or(later, |due| later.min(due.max(world.now)));
                Event::Tick
            }
            220..=229 => Event::Pause { until: Some(world.now.plus(Duration::from_secs(world.number()))) },
            230..=235 => Event::Resume,
            236..=239 => {
                let source = SourceId(u16::try_from(world.number() % 2).unwrap_or_default());
                Event::ServiceAvailabilityChanged {
                    source,
                    availability: if world.index() < 4 { ServiceAvailability::Down } else { ServiceAvailability::Up },
                }
            }
            240..=245 => Event::Drain,
            246..=249 => Event::Release { deadline: Some(world.now.plus(Duration::from_secs(world.number()))) },
            250..=254 => {
                Event::TerminationNotice { deadline: Some(world.now.plus(Duration::from_secs(world.number()))) }
            }
            255 => Event::Abort,
        };
        world.happens(event);
        if world.exited {
            return;
        }
    }
}

struct World<'a> {
    worker: Worker,
    bytes: std::iter::Copied<std::slice::Iter<'a, u8>>,
    now: Instant,
    calls: Vec<(Effect, Instant)>,
    tokens: u64,
    exited: bool,
}

impl<'a> World<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let policy = WorkerPolicy {
            capacity: CAPACITY,
            poll: poll::PollPolicy { interval: Duration::from_secs(1) },
            claim: claim::ClaimPolicy { termination_grace: Duration::from_secs(10), status_poll_interval: None },
            dequeue_alert: 10,
            max_auth_failures: 5,
            drain_deadline: Some(Duration::from_secs(60)),
            exit_policy: ExitPolicy::default(),
            min_resources: MinResources::default(),
            on_termination_notice: OnTerminationNotice::Finish { margin: Duration::from_secs(15) },
        };
        let manner = |long_poll| Capabilities {
            long_poll,
            supports_recovery: long_poll,
            reports_cancellation: true,
            connection_scoped: false,
        };
        let places =
            [false, true].map(|long_poll| SourceSpec { capabilities: manner(long_poll), service: ServiceId(0) });
        let worker = Worker::new(policy, &places, 1);
        let (now, calls) = (Instant::ORIGIN, Vec::new());
        let mut world = Self { worker, bytes: bytes.iter().copied(), now, calls, tokens: 0, exited: false };
        if world.index() == 0 {
            let outcome = Outcome::Exception(ExceptionReason::WorkerShutdown);
            let left = |world: &mut Self| RecoveredClaim {
                token: world.token(),
                source: SourceId(u16::try_from(world.number() % 2).unwrap_or_default()),
                run: world.run(),
                outcome,
            };
            let recovered = (0..world.number() % 4).map(|_| left(&mut world)).collect();
            world.happens(Event::ClaimsRecovered(recovered));
        }
        world.happens(Event::Tick);
        world
    }

    fn number(&mut self) -> u64 {
        self.bytes.next().unwrap_or_default().into()
    }

    fn happens(&mut self, event: Event) {
        self.worker.handle(event, self.now);
        for _ in 0..EFFECTS_MAX {
            let Some(effect) = self.worker.next_effect() else {
                assert!(self.worker.free_slots() <= CAPACITY);
                return;
            };
            assert!(!self.exited, "after the exit: {effect:?}");
            self.sees(effect);
        }
        panic!("one event brought more than {EFFECTS_MAX} effects");
    }

    fn sees(&mut self, effect: Effect) {
        match effect {
            Effect::Exit(_) => self.exited = true,
            Effect::Claim(claim, ClaimAction::Close(_)) => self.calls.retain(|(call, _)| subject(call) != Some(claim)),
            Effect::Claim(claim, ClaimAction::Kill { .. }) => {
                for (call, _) in &mut self.calls {
                    if *call == Effect::Claim(claim, ClaimAction::Prepare)
                        || *call == Effect::Claim(claim, ClaimAction::Execute)
                    {
                        *call = effect.clone();
                    }
                }
            }
            Effect::DropMessage(message) => self.calls.retain(|(call, _)| *call != Effect::Delete(message)),
            Effect::Alert(_) | Effect::Claim(_, ClaimAction::UpdateLease { .. }) => {}
            call => self.calls.push((call, self.now)),
        }
    }

    /// Answers one of the pending calls.
    fn answer(&mut self, choice: u8) -> Event {
        let (effect, sent_at) = self.calls.swap_remove(usize::from(choice) % self.calls.len());
        match effect {
            Effect::Open(source) => {
                let lanes = OpenResult {
                    priority_queues: u16::try_from(self.number() % 4).unwrap_or(1),
                    usable_for: self.span(),
                };
                Event::Opened { source, sent_at, answer: self.or_refused(lanes) }
            }
            Effect::Poll { source, queue: lane, max } => {
                let polled = self.poll_result(u64::from(max));
                Event::Polled { source, queue: lane, sent_at, answer: self.or_refused(polled) }
            }
            Effect::Recover { source, .. } => {
                let claims: Vec<GrantedClaim> = (0..self.number() % 3).map(|_| self.brought()).collect();
                let others = claims.len();
                Event::Recovered {
                    source,
                    sent_at,
                    answer: self.or_refused(RecoveryResult { claims, error: None, foreign_claims: others }),
                }
            }
            Effect::Claim(claim, ClaimAction::Request | ClaimAction::TakeOver) => {
                let length = self.length();
                Event::Claim(claim, ClaimEvent::Claimed { sent_at, answer: self.or_refused(length) })
            }
            Effect::Delete(message) => Event::Deleted { message, answer: self.or_refused(()) },
            Effect::Claim(claim, ClaimAction::Prepare) => {
                let faults = [
                    PrepareFailure::Malformed,
                    PrepareFailure::Unavailable,
                    PrepareFailure::Internal,
                    PrepareFailure::HostFault,
                    PrepareFailure::ServiceDown,
                ];
                let answer = faults.get(self.index()).map_or(Ok(()), |fault| Err(*fault));
                Event::Claim(claim, ClaimEvent::Prepared(answer))
            }
            Effect::Claim(claim, ClaimAction::Execute | ClaimAction::Kill { .. }) => {
                let verdicts = [
                    Ok(()),
                    Err(ExecuteFailure::Failed),
                    Err(ExecuteFailure::Intermittent),
                    Err(ExecuteFailure::HostFault),
                    Err(ExecuteFailure::ServiceDown),
                ];
                let verdict = verdicts.get(self.index()).copied().unwrap_or(Err(ExecuteFailure::Internal));
                Event::Claim(claim, ClaimEvent::Ended(verdict))
            }
            Effect::Claim(claim, ClaimAction::Upload) => {
                let settled = [UploadStatus::Complete, UploadStatus::ArtifactMissing].get(self.index()).copied();
                Event::Claim(claim, ClaimEvent::Uploaded(settled.unwrap_or(UploadStatus::UploadFailed)))
            }
            Effect::Claim(claim, ClaimAction::Report { .. }) => {
                Event::Claim(claim, ClaimEvent::Reported(self.or_refused(())))
            }
            Effect::Claim(claim, ClaimAction::Reclaim { .. }) => {
                let length = self.length();
                Event::Claim(claim, ClaimEvent::Reclaimed { sent_at, answer: self.or_refused(length) })
            }
            Effect::Claim(claim, ClaimAction::CheckStatus) => {
                let resolved = self.index() == 0;
                Event::Claim(claim, ClaimEvent::StatusChecked(self.or_refused(resolved)))
            }
            Effect::ProbeHost => {
                Event::HostProbed(if self.index() == 0 { ProbeResult::Unhealthy } else { ProbeResult::Healthy })
            }
            Effect::DropMessage(_)
            | Effect::Claim(_, ClaimAction::UpdateLease { .. } | ClaimAction::Close(_))
            | Effect::Alert(_)
            | Effect::Exit(_) => Event::Tick,
        }
    }

    fn index(&mut self) -> usize {
        usize::try_from(self.number() % 8).unwrap_or_default()
    }

    fn span(&mut self) -> Option<Duration> {
        Some(Duration::from_secs(self.number() * 10)).filter(|span| !span.is_zero())
    }

    /// A length that a source accepts: more than zero, at most a day.
    fn length(&mut self) -> Duration {
        Duration::from_secs(1 + self.number() * 339)
    }

    fn or_refused<T>(&mut self, value: T) -> Result<T, Refusal> {
        let after = Some(Duration::from_secs(9));
        match self.number() % 16 {
            0 => Err(Refusal::Gone),
            1 => Err(Refusal::Rejected),
            2 => Err(Refusal::Denied),
            3 => Err(Refusal::Stale),
            4 => Err(Refusal::Throttled { retry_after: after }),
            5 => Err(Refusal::Retry { retry_after: None }),
            _ => Ok(value),
        }
    }

    fn token(&mut self) -> LocalToken {
        self.tokens += 1;
        LocalToken(self.tokens)
    }

    fn run(&mut self) -> Run {
        let task = TaskId::parse(&format!("T{}", self.number() % 20)).expect("a task id");
        Run { task, run: 0 }
    }

    fn brought(&mut self) -> GrantedClaim {
        GrantedClaim { token: self.token(), run: self.run(), length: self.length() }
    }

    /// Sometimes one more than requested.
    fn poll_result(&mut self, max: u64) -> PollResult {
        let mut polled = PollResult::default();
        for _ in 0..self.number() % (max + 2) {
            if self.index() < 4 {
                let run = if self.index() == 0 { None } else { Some(self.run()) };
                let id = format!("m{}", self.number() % 9).into();
                let dequeue_count = u32::try_from(self.number() % 20).unwrap_or_default();
                polled.messages.push(ReceivedMessage { token: self.token(), id, dequeue_count, run });
            } else {
                polled.claims.push(self.brought());
            }
        }
        polled
    }
}

fn subject(effect: &Effect) -> Option<LocalToken> {
    if let Effect::Claim(claim, _) = effect { Some(*claim) } else { None }
}
