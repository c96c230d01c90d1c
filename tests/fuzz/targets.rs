//! The targets: each a plain function of bytes that checks what must hold whatever comes.

use std::path::Path;
use std::time::Duration;

use base64::engine::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use journeyman::config::{self, Document, Environment, show};
use journeyman::domain::claim::{self, Settled};
use journeyman::domain::fitness::Condition;
use journeyman::domain::id::{Deployment, Run, SourceId, TaskId, Token};
use journeyman::domain::outcome::{Outcome, Reason, Unprepared, Verdict};
use journeyman::domain::poll::{self, Manner};
use journeyman::domain::refusal::Refusal;
use journeyman::domain::service::Serving;
use journeyman::domain::time::Instant;
use journeyman::domain::worker::{
    Brought, Effect, Event, Found, Haul, Lanes, Least, LeftOver, Noticed, Place, Policy, Seen, Stay, Worker,
};
use journeyman::limits::{REDACT_NEEDLE_BYTES_MAX, REDACT_SECRET_CHARS_MIN};
use journeyman::redact::{Filter, Needles, Shapes};
use journeyman::source::taskcluster::hostile;

/// A target: its name, which is that of its corpus, and what it does with bytes.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// All of them.
pub(crate) const TARGETS: [Target; 7] = [
    ("poll_answer", hostile::poll_answer),
    ("message_text", hostile::message_text),
    ("claim", hostile::claim),
    ("signed_url", hostile::signed_url),
    ("configuration", configuration),
    ("worker_events", worker_events),
    ("secrets", secrets),
];

/// A configuration file: read, refused with its places, or shown.
pub(crate) fn configuration(bytes: &[u8]) {
    let document = Document::new(Path::new("fuzz.toml"), &String::from_utf8_lossy(bytes));
    match config::load(Some(document), &Environment::of(&[]), &[]) {
        Ok(loaded) => {
            let shown = show::show(&loaded, show::Beside::Nothing);
            let again = Document::new(Path::new("again.toml"), &shown);
            assert!(config::load(Some(again), &Environment::of(&[]), &[]).is_ok(), "{shown}");
        }
        Err(problems) => assert!(!problems.to_string().is_empty()),
    }
}

/// A log with a secret in it. The first bytes choose how long the secret is, how long its lines, how they end, and how it is
/// cut; then the secret comes, then what is around it. It must come out neither as it is nor in base64, and nothing of what
/// comes out depends on the cuts.
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
    // Those that are of the secret alone; of a short one there may be none.
    let own = (before.len() * 8).div_ceil(6)..(before.len() + secret.len()) * 8 / 6;
    let told = characters.get(own).unwrap_or_default().concat();
    let log = [before, secret.as_bytes(), after, characters.concat().as_bytes(), b"|"].concat();

    let mut set = Needles::new(if manner & 8 == 0 { Shapes::Known } else { Shapes::Unknown });
    set.add(secret);
    let filtered = |piece: usize| {
        let (mut filter, mut out) = (Filter::default(), Vec::new());
        for piece in log.chunks(piece.max(1)) {
            filter.push(&[&set], piece, &mut out);
            assert!(filter.held() < REDACT_NEEDLE_BYTES_MAX, "{} bytes are held back", filter.held());
        }
        filter.finish(&[&set], &mut out);
        out
    };
    let out = filtered(log.len());
    assert_eq!(out, filtered(usize::from(*cut)), "the cuts make a difference");
    if secret.chars().count() >= REDACT_SECRET_CHARS_MIN {
        for text in [secret, told.trim_end()] {
            let shown = out.windows(text.len()).any(|part| part == text.as_bytes());
            assert!(!shown || "[redacted]".contains(text), "{text} is shown");
        }
    }
}

const CAPACITY: u32 = 3;
/// How many effects one event may bring; a loop that feeds itself would bring more.
const EFFECTS_MAX: usize = 1_000;

/// What happens to a worker: each byte chooses a call to answer, an order, or time to pass; the next ones say how.
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
                Event::Serving { source, serving: if world.index() < 4 { Serving::Down } else { Serving::Up } }
            }
            240..=245 => Event::Drain,
            246..=249 => Event::HandBack { deadline: Some(world.now.plus(Duration::from_secs(world.number()))) },
            250..=253 => Event::Terminate { deadline: Some(world.now.plus(Duration::from_secs(world.number()))) },
            254 => Event::Retire,
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
        let policy = Policy {
            capacity: CAPACITY,
            poll: poll::Policy { interval: Duration::from_secs(1) },
            claim: claim::Policy { grace: Duration::from_secs(10), check_every: None },
            dequeue_alert: 10,
            denied_max: 5,
            drain_deadline: Some(Duration::from_secs(60)),
            stay: Stay::default(),
            least: Least::default(),
            noticed: Noticed::MayFinish { margin: Duration::from_secs(15) },
        };
        let manner =
            |long_poll| Manner { long_poll, recovers: long_poll, tells_canceled: true, ends_with_worker: false };
        let places = [false, true].map(|long_poll| Place { manner: manner(long_poll), deployment: Deployment(0) });
        let worker = Worker::new(policy, &places, 1);
        let (now, calls) = (Instant::ORIGIN, Vec::new());
        let mut world = Self { worker, bytes: bytes.iter().copied(), now, calls, tokens: 0, exited: false };
        if world.index() == 0 {
            let outcome = Outcome::Exception(Reason::WorkerShutdown);
            let left = |world: &mut Self| LeftOver {
                token: world.token(),
                source: SourceId(u16::try_from(world.number() % 2).unwrap_or_default()),
                run: world.run(),
                outcome,
            };
            let left_over = (0..world.number() % 4).map(|_| left(&mut world)).collect();
            world.happens(Event::LeftOver(left_over));
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
                assert!(self.worker.free() <= CAPACITY);
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
            Effect::Close { claim, .. } => self.calls.retain(|(call, _)| subject(call) != Some(claim)),
            Effect::Kill { claim, .. } => {
                // The preparation or the payload is what answers.
                for (call, _) in &mut self.calls {
                    if *call == Effect::Prepare(claim) || *call == Effect::Execute(claim) {
                        *call = effect.clone();
                    }
                }
            }
            Effect::Forget(message) => self.calls.retain(|(call, _)| *call != Effect::Delete(message)),
            Effect::Alert(_) | Effect::Extended { .. } => {}
            call => self.calls.push((call, self.now)),
        }
    }

    /// Answers one of the calls under way.
    fn answer(&mut self, choice: u8) -> Event {
        let (effect, sent_at) = self.calls.swap_remove(usize::from(choice) % self.calls.len());
        match effect {
            Effect::Open(source) => {
                let lanes = Lanes { count: u16::try_from(self.number() % 4).unwrap_or(1), usable_for: self.span() };
                Event::Opened { source, sent_at, answer: self.or_refused(lanes) }
            }
            Effect::Poll { source, lane, max } => {
                let haul = self.haul(u64::from(max));
                Event::Polled { source, lane, sent_at, answer: self.or_refused(haul) }
            }
            Effect::Recover { source, .. } => {
                let claims: Vec<Brought> = (0..self.number() % 3).map(|_| self.brought()).collect();
                let others = claims.len();
                Event::Recovered { source, sent_at, answer: self.or_refused(Found { claims, missed: None, others }) }
            }
            Effect::Claim(claim) => {
                let length = self.length();
                Event::Claimed { claim, sent_at, answer: self.or_refused(length) }
            }
            Effect::TakeOver(claim) => {
                let length = self.length();
                Event::TakenOver { claim, sent_at, answer: self.or_refused(length) }
            }
            Effect::Delete(message) => Event::Deleted { message, answer: self.or_refused(()) },
            Effect::Prepare(claim) => {
                let faults = [
                    Unprepared::Malformed,
                    Unprepared::Unavailable,
                    Unprepared::Internal,
                    Unprepared::Host,
                    Unprepared::Away,
                ];
                let answer = faults.get(self.index()).map_or(Ok(()), |fault| Err(*fault));
                Event::Prepared { claim, answer }
            }
            Effect::Execute(claim) | Effect::Kill { claim, .. } => {
                let verdicts =
                    [Verdict::Completed, Verdict::Failed, Verdict::Intermittent, Verdict::Host, Verdict::Away];
                let verdict = verdicts.get(self.index()).copied().unwrap_or(Verdict::Internal);
                Event::Ended { claim, verdict }
            }
            Effect::Settle(claim) => {
                let settled = [Settled::Clean, Settled::Missing].get(self.index()).copied();
                Event::Settled { claim, settled: settled.unwrap_or(Settled::Unstored) }
            }
            Effect::Report { claim, .. } => Event::Reported { claim, answer: self.or_refused(()) },
            Effect::Reclaim { claim, .. } => {
                let length = self.length();
                Event::Reclaimed { claim, sent_at, answer: self.or_refused(length) }
            }
            Effect::Check(claim) => {
                let resolved = self.index() == 0;
                Event::Checked { claim, answer: self.or_refused(resolved) }
            }
            Effect::Look => Event::Looked(if self.index() == 0 { Condition::Unfit } else { Condition::Fit }),
            Effect::Forget(_) | Effect::Extended { .. } | Effect::Close { .. } | Effect::Alert(_) | Effect::Exit(_) => {
                Event::Tick
            }
        }
    }

    fn index(&mut self) -> usize {
        usize::try_from(self.number() % 8).unwrap_or_default()
    }

    fn span(&mut self) -> Option<Duration> {
        Some(Duration::from_secs(self.number() * 10)).filter(|span| !span.is_zero())
    }

    /// Any that a source believes: more than nothing, and at most a day.
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
            4 => Err(Refusal::Throttled { after }),
            5 => Err(Refusal::Retry { after: None }),
            _ => Ok(value),
        }
    }

    fn token(&mut self) -> Token {
        self.tokens += 1;
        Token(self.tokens)
    }

    fn run(&mut self) -> Run {
        let task = TaskId::parse(&format!("T{}", self.number() % 20)).expect("a task id");
        Run { task, run: 0 }
    }

    fn brought(&mut self) -> Brought {
        Brought { token: self.token(), run: self.run(), length: self.length() }
    }

    /// One more than was asked for, at times.
    fn haul(&mut self, max: u64) -> Haul {
        let mut haul = Haul::default();
        for _ in 0..self.number() % (max + 2) {
            if self.index() < 4 {
                let run = if self.index() == 0 { None } else { Some(self.run()) };
                let id = format!("m{}", self.number() % 9).into();
                let dequeue_count = u32::try_from(self.number() % 20).unwrap_or_default();
                haul.messages.push(Seen { token: self.token(), id, dequeue_count, run });
            } else {
                haul.claims.push(self.brought());
            }
        }
        haul
    }
}

fn subject(effect: &Effect) -> Option<Token> {
    match effect {
        Effect::Claim(claim) | Effect::TakeOver(claim) | Effect::Prepare(claim) | Effect::Execute(claim) => {
            Some(*claim)
        }
        Effect::Settle(claim) | Effect::Check(claim) => Some(*claim),
        Effect::Kill { claim, .. } | Effect::Report { claim, .. } | Effect::Reclaim { claim, .. } => Some(*claim),
        Effect::Open(_)
        | Effect::Poll { .. }
        | Effect::Recover { .. }
        | Effect::Delete(_)
        | Effect::Forget(_)
        | Effect::Extended { .. }
        | Effect::Close { .. }
        | Effect::Look
        | Effect::Alert(_)
        | Effect::Exit(_) => None,
    }
}
