//! The state of `journeyman top` and its key bindings, independent of the terminal.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::Question;
use crate::console::text::strip_control_chars;
use crate::control::{WorkerCommand, WorkerStatusReply};
use journeyman_worker::engine::status::{ClaimStatus, LifecycleState};

/// What a key requires outside of the screen.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum KeyAction {
    Quit,
    Send(WorkerCommand),
}

#[derive(Debug, Default)]
pub(super) struct TopScreen {
    pub(super) status: Option<WorkerStatusReply>,
    pub(super) error: Option<String>,
    /// Reply to the last command.
    pub(super) message: Option<String>,
    pub(super) question: Option<Question>,
    selected: Option<String>,
}

pub(super) fn display_name(task: &ClaimStatus) -> String {
    format!("{}/{}", task.task, task.run)
}

impl TopScreen {
    pub(super) fn set_status(&mut self, status: WorkerStatusReply) {
        self.status = Some(status);
        self.error = None;
    }

    pub(super) fn set_error(&mut self, why: &str) {
        self.error = Some(strip_control_chars(why));
    }

    pub(super) fn set_message(&mut self, what: &str) {
        self.message = Some(strip_control_chars(what));
    }

    pub(super) fn tasks(&self) -> &[ClaimStatus] {
        self.status.as_ref().map_or(&[], |status| &status.snapshot.claims)
    }

    /// Index of the selected task; the first if the selected one has ended.
    pub(super) fn selected(&self) -> Option<usize> {
        let tasks = self.tasks();
        let at = tasks.iter().position(|task| Some(display_name(task)) == self.selected);
        at.or_else(|| (!tasks.is_empty()).then_some(0))
    }

    pub(super) fn on_key(&mut self, key: KeyEvent) -> Option<KeyAction> {
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Some(KeyAction::Quit);
        }
        self.message = None;
        match self.question.take() {
            Some(question) => matches!(key.code, KeyCode::Char('y' | 'Y')).then_some(KeyAction::Send(question.command)),
            None => self.worker_key(key.code),
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "every other key does nothing")]
    fn worker_key(&mut self, code: KeyCode) -> Option<KeyAction> {
        match code {
            KeyCode::Char('q') => return Some(KeyAction::Quit),
            KeyCode::Char('j') | KeyCode::Down => self.move_selection(1),
            KeyCode::Char('k') | KeyCode::Up => self.move_selection(-1),
            KeyCode::Char('p') => self.ask_pause(),
            KeyCode::Char('d') => {
                self.ask("Drain: finish running tasks, then exit?".to_owned(), WorkerCommand::Drain { seconds: None });
            }
            KeyCode::Char('b') => {
                let task = self.tasks().get(self.selected()?)?;
                let text = format!("Release {}: stop it and let the queue run it again?", display_name(task));
                self.ask(text, WorkerCommand::Release { task: display_name(task) });
            }
            KeyCode::Char('c') => {
                let task = self.tasks().get(self.selected()?)?;
                let text = format!("Cancel {}: stop it and fail it?", display_name(task));
                self.ask(text, WorkerCommand::Cancel { task: display_name(task) });
            }
            _ => {}
        }
        None
    }

    fn ask(&mut self, text: String, command: WorkerCommand) {
        self.question = Some(Question { text, command });
    }

    fn ask_pause(&mut self) {
        match self.status.as_ref().map(|status| status.snapshot.state) {
            Some(LifecycleState::Paused) => self.ask("Resume: claim again?".to_owned(), WorkerCommand::Resume),
            Some(LifecycleState::Running) => {
                let text = "Pause: claim nothing, let running tasks continue?".to_owned();
                self.ask(text, WorkerCommand::Pause { seconds: None });
            }
            Some(
                LifecycleState::Exiting | LifecycleState::Draining | LifecycleState::Releasing | LifecycleState::Exited,
            )
            | None => self.message = Some("the worker is shutting down and claims nothing".to_owned()),
        }
    }

    fn move_selection(&mut self, by: isize) {
        let last = self.tasks().len().saturating_sub(1);
        let at = self.selected().unwrap_or(0).saturating_add_signed(by).min(last);
        self.selected = self.tasks().get(at).map(display_name);
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::draw::draw;
    use super::*;
    use serde_json::{Value, json};

    use journeyman_worker::engine::counters::WorkerCounts;

    fn task(task: &str, left: f64, progress: Option<&str>) -> Value {
        json!({
            "task": task, "run": 0, "name": "build linux\u{202e}64", "source": "ci", "state": "running", "progress": progress,
            "held_seconds": 201.0, "lease_left_seconds": left, "lease_seconds": 1200.0, "reclaimed_seconds_ago": null,
            "log_bytes": 2_345_678, "memory_bytes": 430 << 20,
        })
    }

    fn status(state: LifecycleState) -> WorkerStatusReply {
        let source = |name: &str, error: Value| {
            json!({
                "name": name, "description": "prov/linux at tc.example.com, claim-work", "state": "asked",
                "failing": error.is_object(), "polled_seconds_ago": 4.0, "error": error,
            })
        };
        let error = json!({ "message": "poll: 502\x1b[2J", "seconds_ago": 2.0, "consecutive": 3 });
        serde_json::from_value(json!({
            "version": "0.3.0", "id": "host-1", "group": "eu", "pid": 4121, "state": state,
            "blocked_reason": (state == LifecycleState::Paused).then_some("paused"),
            "blocked_message": (state == LifecycleState::Paused).then_some("paused until `journeyman resume`"),
            "note": (state == LifecycleState::Paused).then_some(json!({ "by": "ana", "text": "kernel\x1b[31m update" })),
            "uptime_seconds": 11_520.0, "capacity": 4, "sources": [source("ci", Value::Null), source("nightly", error)],
            "claims": [
                task("fN1SbArXTPSVFNUvaOlinQ", 21.0, Some("compile \x1b[31m63 %")),
                task("aX9SbArXTPSVFNUvaOlin1", 999.0, None),
            ],
            "last_hour": { "completed": 112, "failed": 6, "internal-error": 2, "worker-shutdown": 1 },
            "counts": WorkerCounts::default(), "containment": "group",
            "host": { "disk_free": 212_u64 << 30, "disk_min": 0, "memory_free": 9_u64 << 30, "memory_min": 0 },
            "next": "reclaim fN1SbArXTPSVFNUvaOlinQ/0 in 3s", "hints": ["nightly has been failing for 8s"],
        }))
        .unwrap()
    }

    fn screen(state: LifecycleState) -> TopScreen {
        let mut screen = TopScreen::default();
        screen.set_status(status(state));
        screen
    }

    fn press(screen: &mut TopScreen, code: KeyCode) -> Option<KeyAction> {
        screen.on_key(KeyEvent::from(code))
    }

    fn rendered(screen: &TopScreen, width: u16, height: u16) -> String {
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
    fn every_view_matches_its_golden_file() {
        let running = screen(LifecycleState::Running);
        golden("running", &rendered(&running, 120, 24));
        golden("narrow", &rendered(&running, 80, 20));
        let mut paused = screen(LifecycleState::Paused);
        paused.set_error("the worker did not answer");
        golden("paused", &rendered(&paused, 120, 24));
        press(&mut paused, KeyCode::Char('d'));
        golden("asked", &rendered(&paused, 120, 24));
        press(&mut paused, KeyCode::Esc);
        press(&mut paused, KeyCode::Char('c'));
        golden("cancel", &rendered(&paused, 80, 20));
    }

    #[test]
    fn a_terminal_of_any_size_can_be_drawn() {
        for (width, height) in [(1, 1), (3, 2), (20, 5), (300, 3), (7, 90)] {
            let mut screen = screen(LifecycleState::Running);
            rendered(&screen, width, height);
            press(&mut screen, KeyCode::Char('?'));
            rendered(&screen, width, height);
            press(&mut screen, KeyCode::Char('x'));
            press(&mut screen, KeyCode::Char('d'));
            rendered(&screen, width, height);
        }
    }

    #[test]
    fn a_command_is_sent_only_after_a_confirmation() {
        for (state, key, command) in [
            (LifecycleState::Running, 'p', WorkerCommand::Pause { seconds: None }),
            (LifecycleState::Paused, 'p', WorkerCommand::Resume),
            (LifecycleState::Running, 'd', WorkerCommand::Drain { seconds: None }),
            (LifecycleState::Running, 'b', WorkerCommand::Release { task: "fN1SbArXTPSVFNUvaOlinQ/0".to_owned() }),
            (LifecycleState::Draining, 'c', WorkerCommand::Cancel { task: "fN1SbArXTPSVFNUvaOlinQ/0".to_owned() }),
        ] {
            let mut screen = screen(state);
            assert_eq!(press(&mut screen, KeyCode::Char(key)), None);
            for no in [KeyCode::Char('n'), KeyCode::Enter, KeyCode::Esc, KeyCode::Char(key)] {
                assert_eq!(press(&mut screen, no), None, "any other key declines");
                assert_eq!(press(&mut screen, KeyCode::Char('y')), None, "no question is open");
                assert_eq!(press(&mut screen, KeyCode::Char(key)), None);
            }
            press(&mut screen, KeyCode::Esc);
            press(&mut screen, KeyCode::Char(key));
            assert_eq!(press(&mut screen, KeyCode::Char('y')), Some(KeyAction::Send(command)));
        }
        let mut leaving = screen(LifecycleState::Draining);
        press(&mut leaving, KeyCode::Char('p'));
        assert_eq!(press(&mut leaving, KeyCode::Char('y')), None);
    }

    #[test]
    fn a_selection_follows_its_task() {
        let mut screen = screen(LifecycleState::Running);
        press(&mut screen, KeyCode::Char('j'));
        press(&mut screen, KeyCode::Char('j'));
        assert_eq!(screen.selected(), Some(1), "the last row");
        let mut other = status(LifecycleState::Running);
        other.snapshot.claims.reverse();
        screen.set_status(other);
        assert_eq!(screen.selected(), Some(0));
        assert_eq!(press(&mut screen, KeyCode::Char('q')), Some(KeyAction::Quit));
        let mut none = status(LifecycleState::Running);
        none.snapshot.claims.clear();
        screen.set_status(none);
        assert_eq!((screen.selected(), press(&mut screen, KeyCode::Char('c'))), (None, None));
    }
}
