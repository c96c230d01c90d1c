//! What `top` shows and what its keys do, without a terminal.

use std::collections::VecDeque;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::Question;
use crate::cli::steer::status::plain;
use crate::control::{Order, Status};
use crate::limits::{TOP_LOG_LINE_BYTES_MAX, TOP_LOG_LINES_MAX};
use crate::worker::view::{State, Task};

/// What a key asks for beyond the screen.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Act {
    /// Leave.
    Quit,
    /// Give the worker an order.
    Tell(Order),
    /// Follow the log of this task.
    Follow(String),
    /// Follow no log.
    LetGo,
}

/// What is in front.
#[derive(Debug, Default)]
pub(super) enum Front {
    /// The worker.
    #[default]
    Worker,
    /// The keys.
    Help,
    /// A question.
    Asked(Question),
    /// The log of a task.
    Log(Log),
}

/// The end of a log, line by line.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) task: String,
    pub(super) lines: VecDeque<String>,
    /// How many lines above the end the view ends.
    pub(super) above: usize,
    rest: Vec<u8>,
}

/// Everything that is shown.
#[derive(Debug, Default)]
pub(super) struct Screen {
    pub(super) status: Option<Status>,
    /// Why there is no newer status.
    pub(super) trouble: Option<String>,
    /// What came of the last order.
    pub(super) said: Option<String>,
    pub(super) front: Front,
    selected: Option<String>,
}

/// A task's name as a person reads it.
pub(super) fn name(task: &Task) -> String {
    format!("{}/{}", task.task, task.run)
}

/// A task's name as the control socket takes it: no other is called so.
fn whole(task: &Task) -> String {
    format!("{}:{}", task.source, name(task))
}

impl Screen {
    /// The worker has been looked at.
    pub(super) fn looked(&mut self, status: Status) {
        self.status = Some(status);
        self.trouble = None;
    }

    /// The worker did not answer.
    pub(super) fn unanswered(&mut self, why: &str) {
        self.trouble = Some(plain(why));
    }

    /// The worker answered an order.
    pub(super) fn said(&mut self, what: &str) {
        self.said = Some(plain(what));
    }

    /// More of the log that is followed.
    pub(super) fn logged(&mut self, piece: &[u8]) {
        if let Front::Log(log) = &mut self.front {
            log.take(piece);
        }
    }

    /// There is no more of the log.
    pub(super) fn log_ended(&mut self, why: &str) {
        if let Front::Log(log) = &mut self.front {
            if !log.rest.is_empty() {
                log.take(b"\n");
            }
            log.push(format!("[{}]", plain(why)));
        }
    }

    pub(super) fn tasks(&self) -> &[Task] {
        self.status.as_ref().map_or(&[], |status| &status.view.tasks)
    }

    /// Where the selected task stands; the first where it has gone.
    pub(super) fn selected(&self) -> Option<usize> {
        let tasks = self.tasks();
        let at = tasks.iter().position(|task| Some(whole(task)) == self.selected);
        at.or_else(|| (!tasks.is_empty()).then_some(0))
    }

    /// A key was pressed.
    pub(super) fn key(&mut self, key: KeyEvent) -> Option<Act> {
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Some(Act::Quit);
        }
        self.said = None;
        match std::mem::take(&mut self.front) {
            Front::Help => None,
            Front::Asked(question) => matches!(key.code, KeyCode::Char('y' | 'Y')).then_some(Act::Tell(question.order)),
            Front::Log(log) => self.log_key(log, key.code),
            Front::Worker => self.worker_key(key.code),
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "every other key does nothing")]
    fn log_key(&mut self, mut log: Log, code: KeyCode) -> Option<Act> {
        match code {
            KeyCode::Char('q' | 'l') | KeyCode::Esc => return Some(Act::LetGo),
            KeyCode::Char('k') | KeyCode::Up => log.above += 1,
            KeyCode::PageUp => log.above += 10,
            KeyCode::Char('j') | KeyCode::Down => log.above = log.above.saturating_sub(1),
            KeyCode::PageDown => log.above = log.above.saturating_sub(10),
            KeyCode::Char('G') | KeyCode::End => log.above = 0,
            _ => {}
        }
        log.above = log.above.min(log.lines.len().saturating_sub(1));
        self.front = Front::Log(log);
        None
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "every other key does nothing")]
    fn worker_key(&mut self, code: KeyCode) -> Option<Act> {
        match code {
            KeyCode::Char('q') => return Some(Act::Quit),
            KeyCode::Char('?' | 'h') => self.front = Front::Help,
            KeyCode::Char('j') | KeyCode::Down => self.step(1),
            KeyCode::Char('k') | KeyCode::Up => self.step(-1),
            KeyCode::Char('p') => self.ask_pause(),
            KeyCode::Char('d') => {
                let asks = "Drain: finish what runs, claim nothing more, then exit?".to_owned();
                self.front = Front::Asked(Question { asks, order: Order::Drain { seconds: None } });
            }
            KeyCode::Char('l') | KeyCode::Enter => {
                let task = self.tasks().get(self.selected()?)?;
                let (name, whole) = (name(task), whole(task));
                self.front = Front::Log(Log::of(name));
                return Some(Act::Follow(whole));
            }
            KeyCode::Char('b') => {
                let task = self.tasks().get(self.selected()?)?;
                let asks = format!("Hand {} back: end it, and let the queue give it to somebody?", name(task));
                self.front = Front::Asked(Question { asks, order: Order::HandBack { task: whole(task) } });
            }
            KeyCode::Char('c') => {
                let task = self.tasks().get(self.selected()?)?;
                let asks = format!("Cancel {}: end it, so that nobody does it?", name(task));
                self.front = Front::Asked(Question { asks, order: Order::Cancel { task: whole(task) } });
            }
            _ => {}
        }
        None
    }

    fn ask_pause(&mut self) {
        let state = self.status.as_ref().map(|status| status.view.state);
        let question = match state {
            Some(State::Paused) => Question { asks: "Resume: claim again?".to_owned(), order: Order::Resume },
            Some(State::Running) => {
                let asks = "Pause: claim nothing, what runs goes on?".to_owned();
                Question { asks, order: Order::Pause { seconds: None } }
            }
            Some(State::Leaving | State::Draining | State::HandingBack | State::Exited) | None => {
                self.said = Some("it is about to leave, and claims nothing".to_owned());
                return;
            }
        };
        self.front = Front::Asked(question);
    }

    fn step(&mut self, by: isize) {
        let last = self.tasks().len().saturating_sub(1);
        let at = self.selected().unwrap_or(0).saturating_add_signed(by).min(last);
        self.selected = self.tasks().get(at).map(whole);
    }
}

impl Log {
    pub(super) fn of(task: String) -> Self {
        Self { task, lines: VecDeque::new(), above: 0, rest: Vec::new() }
    }

    fn take(&mut self, piece: &[u8]) {
        for byte in piece {
            match byte {
                b'\n' => {
                    let line = std::mem::take(&mut self.rest);
                    self.push(plain(&String::from_utf8_lossy(&line)));
                }
                byte if self.rest.len() < TOP_LOG_LINE_BYTES_MAX => self.rest.push(*byte),
                // What is beyond no screen is wide enough for.
                _ => {}
            }
        }
    }

    fn push(&mut self, line: String) {
        if self.lines.len() == TOP_LOG_LINES_MAX {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
        // Who reads further up keeps the place.
        if self.above > 0 {
            self.above = (self.above + 1).min(self.lines.len().saturating_sub(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::draw::draw;
    use super::*;
    use crate::worker::view::{Host, Next, Note, Outcomes, Source, SourceError, View};

    fn task(task: &str, left: f64, progress: &str) -> Task {
        Task {
            task: task.to_owned(),
            run: 0,
            source: "ci".to_owned(),
            step: "running".to_owned(),
            progress: Some(progress.to_owned()),
            held_seconds: 201.0,
            lease_left_seconds: Some(left),
            lease_seconds: Some(1200.0),
            reclaimed_seconds_ago: None,
            log_bytes: 2_345_678,
            memory_bytes: Some(430 << 20),
            trace_id: None,
        }
    }

    fn status(state: State) -> Status {
        let source = |name: &str, error| Source {
            others: 0,
            clock_ahead_seconds: None,
            tallies: std::collections::BTreeMap::new(),
            name: name.to_owned(),
            what: "prov/linux at tc.example.com, claim-work".to_owned(),
            step: "asked".to_owned(),
            in_trouble: error,
            polled_seconds_ago: Some(4.0),
            brought_seconds_ago: None,
            next_poll_in_seconds: None,
            error: error.then(|| SourceError { text: "poll: 502\x1b[2J".to_owned(), seconds_ago: 2.0, in_a_row: 3 }),
            counts: crate::worker::counters::SourceCounts::default(),
        };
        let view = View {
            services: Vec::new(),
            activity: None,
            state,
            not_claiming: (state == State::Paused).then(|| "paused until `journeyman resume`".to_owned()),
            blocked: None,
            note: (state == State::Paused).then(|| Note { by: "ana".to_owned(), text: "kernel".to_owned() }),
            uptime_seconds: 11_520.0,
            capacity: 4,
            asked: 1,
            sources: vec![source("ci", false), source("nightly", true)],
            tasks: vec![
                task("fN1SbArXTPSVFNUvaOlinQ", 21.0, "compile\x1b[31m 63 %"),
                task("aX9SbArXTPSVFNUvaOlin1", 999.0, ""),
            ],
            last_hour: Outcomes { completed: 112, failed: 6, exceptions: 2, handed_back: 1, superseded: 0, lost: 0 },
            counts: crate::worker::counters::Counts::default(),
            host: Host { disk_free: Some(212 << 30), memory_free: Some(9 << 30), ..Host::default() },
            containment: "group".to_owned(),
            notice: None,
            watches: Vec::new(),
            kept: Vec::new(),
            recovered: None,
            spans: None,
            next: Some(Next { what: "reclaim fN1SbArXTPSVFNUvaOlinQ/0".to_owned(), in_seconds: 3.0 }),
            hints: vec!["nightly has been in trouble for 8s".to_owned()],
        };
        Status { version: "0.3.0".into(), id: "host-1".into(), group: "eu".into(), pid: 4121, view }
    }

    fn screen(state: State) -> Screen {
        let mut screen = Screen::default();
        screen.looked(status(state));
        screen
    }

    fn press(screen: &mut Screen, code: KeyCode) -> Option<Act> {
        screen.key(KeyEvent::from(code))
    }

    fn shown(screen: &Screen, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, screen)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |row: u16| {
            let cells = (0..width).map(|column| buffer[(column, row)].symbol());
            cells.collect::<String>().trim_end().to_owned()
        };
        (0..height).map(line).collect::<Vec<_>>().join("\n") + "\n"
    }

    /// Compares with `tests/cli/top/NAME.txt`; `UPDATE_GOLDEN=1` writes it.
    #[expect(clippy::disallowed_methods, reason = "a test's own switch")]
    fn golden(name: &str, text: &str) {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/cli/top/{name}.txt"));
        if std::env::var("UPDATE_GOLDEN").is_ok() {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            return std::fs::write(&path, text).unwrap();
        }
        assert_eq!(text, std::fs::read_to_string(&path).unwrap_or_default(), "{} differs", path.display());
    }

    #[test]
    fn each_of_its_faces_is_as_written_down() {
        let mut running = screen(State::Running);
        golden("running", &shown(&running, 120, 24));
        golden("narrow", &shown(&running, 80, 20));
        press(&mut running, KeyCode::Char('?'));
        golden("help", &shown(&running, 120, 24));
        let mut paused = screen(State::Paused);
        paused.unanswered("the worker did not answer");
        golden("paused", &shown(&paused, 120, 24));
        press(&mut paused, KeyCode::Char('d'));
        golden("asked", &shown(&paused, 120, 24));
        press(&mut paused, KeyCode::Esc);
        press(&mut paused, KeyCode::Char('c'));
        golden("cancel", &shown(&paused, 80, 20));
        press(&mut paused, KeyCode::Esc);
        press(&mut paused, KeyCode::Char('l'));
        paused.logged(b"first\nsecond \x1b[31mred\n");
        paused.log_ended("the log ends here");
        golden("log", &shown(&paused, 120, 12));
    }

    #[test]
    fn no_size_is_too_small_to_draw() {
        for (width, height) in [(1, 1), (3, 2), (20, 5), (300, 3), (7, 90)] {
            let mut screen = screen(State::Running);
            shown(&screen, width, height);
            press(&mut screen, KeyCode::Char('?'));
            shown(&screen, width, height);
            press(&mut screen, KeyCode::Char('x'));
            press(&mut screen, KeyCode::Char('l'));
            shown(&screen, width, height);
        }
    }

    #[test]
    fn an_order_is_given_only_after_a_yes() {
        for (state, key, order) in [
            (State::Running, 'p', Order::Pause { seconds: None }),
            (State::Paused, 'p', Order::Resume),
            (State::Running, 'd', Order::Drain { seconds: None }),
            (State::Running, 'b', Order::HandBack { task: "ci:fN1SbArXTPSVFNUvaOlinQ/0".to_owned() }),
            (State::Draining, 'c', Order::Cancel { task: "ci:fN1SbArXTPSVFNUvaOlinQ/0".to_owned() }),
        ] {
            let mut screen = screen(state);
            assert_eq!(press(&mut screen, KeyCode::Char(key)), None);
            for no in [KeyCode::Char('n'), KeyCode::Enter, KeyCode::Esc, KeyCode::Char(key)] {
                assert_eq!(press(&mut screen, no), None, "any other key is no");
                assert_eq!(press(&mut screen, KeyCode::Char('y')), None, "nothing is asked any more");
                assert_eq!(press(&mut screen, KeyCode::Char(key)), None);
            }
            press(&mut screen, KeyCode::Esc);
            press(&mut screen, KeyCode::Char(key));
            assert_eq!(press(&mut screen, KeyCode::Char('y')), Some(Act::Tell(order)));
        }
        let mut leaving = screen(State::Draining);
        press(&mut leaving, KeyCode::Char('p'));
        assert_eq!(press(&mut leaving, KeyCode::Char('y')), None);
    }

    #[test]
    fn a_selection_stays_with_its_task() {
        let mut screen = screen(State::Running);
        press(&mut screen, KeyCode::Char('j'));
        press(&mut screen, KeyCode::Char('j'));
        assert_eq!(screen.selected(), Some(1), "it ends at the last");
        let mut other = status(State::Running);
        other.view.tasks.reverse();
        screen.looked(other);
        assert_eq!(screen.selected(), Some(0));
        let follow = press(&mut screen, KeyCode::Char('l'));
        assert_eq!(follow, Some(Act::Follow("ci:aX9SbArXTPSVFNUvaOlin1/0".to_owned())));
        assert_eq!(press(&mut screen, KeyCode::Char('q')), Some(Act::LetGo));
        assert_eq!(press(&mut screen, KeyCode::Char('q')), Some(Act::Quit));
        let mut none = status(State::Running);
        none.view.tasks.clear();
        screen.looked(none);
        assert_eq!((screen.selected(), press(&mut screen, KeyCode::Char('l'))), (None, None));
    }

    #[test]
    fn a_log_that_does_not_end_takes_no_more_than_its_bound() {
        let mut log = Log::of("t/0".to_owned());
        log.take(&vec![b'x'; 1 << 20]);
        assert_eq!(log.rest.len(), TOP_LOG_LINE_BYTES_MAX);
        for _ in 0..2 * TOP_LOG_LINES_MAX {
            log.take(b"line\n");
        }
        assert_eq!(log.lines.len(), TOP_LOG_LINES_MAX);
    }
}
