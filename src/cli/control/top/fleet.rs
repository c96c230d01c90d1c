//! `journeyman top --fleet`: the workers of all hosts, narrowed by a text, and why each does what it does.

use std::collections::BTreeMap;

use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::Stylize as _;
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, TableState, Wrap};
use ratatui::{DefaultTerminal, Frame};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::draw;
use crate::cli::exit::Exit;
use crate::console::app::{Console, fleet};
use crate::console::rows::Table;
use crate::console::text::strip_control_chars;
use journeyman_domain::limits::TOP_REFRESH_INTERVAL;

const KEYS: &str = "q quit   / filter   j/k select   enter why   esc back";

#[derive(Debug, Default)]
pub(super) struct FleetScreen {
    workers: Table,
    /// The status of each worker, in lines.
    statuses: BTreeMap<String, String>,
    filter: String,
    is_typing: bool,
    selected: usize,
    /// The worker whose status is shown.
    explained: Option<String>,
}

impl FleetScreen {
    /// The workers that have the filter in one of their cells, and which of them is selected.
    fn shown(&self) -> (Table, usize) {
        let wanted = self.filter.to_lowercase();
        let mut shown = self.workers.clone();
        shown.rows.retain(|row| row.iter().any(|cell| cell.text().to_lowercase().contains(&wanted)));
        let last = shown.rows.len().saturating_sub(1);
        (shown, self.selected.min(last))
    }

    /// What is known of a worker without a status, in lines.
    fn row(&self, name: &str) -> String {
        let row = self.workers.rows.iter().find(|row| row.first().is_some_and(|cell| cell.text() == name));
        let lines = self.workers.columns.iter().zip(row.into_iter().flatten());
        lines.map(|(column, cell)| format!("{column}: {}\n", strip_control_chars(&cell.text()))).collect()
    }

    /// Returns whether the program ends.
    #[expect(clippy::wildcard_enum_match_arm, reason = "every other key does nothing")]
    pub(super) fn on_key(&mut self, key: KeyEvent) -> bool {
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return true;
        }
        if self.is_typing {
            match key.code {
                KeyCode::Enter => self.is_typing = false,
                KeyCode::Esc => (self.is_typing, self.filter) = (false, String::new()),
                KeyCode::Backspace => drop(self.filter.pop()),
                KeyCode::Char(char) => self.filter.push(char),
                _ => {}
            }
            return false;
        }
        let (shown, selected) = self.shown();
        match key.code {
            KeyCode::Char('q') => return true,
            KeyCode::Esc if self.explained.is_some() => self.explained = None,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char('j') | KeyCode::Down => self.selected = selected + 1,
            KeyCode::Char('k') | KeyCode::Up => self.selected = selected.saturating_sub(1),
            KeyCode::Enter => self.explained = shown.rows.get(selected).and_then(|row| Some(row.first()?.text())),
            _ => {}
        }
        false
    }

    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        let [middle, foot] = Layout::vertical([Constraint::Min(4), Constraint::Length(2)]).areas(frame.area());
        if let Some(name) = &self.explained {
            let block = Block::bordered().title(format!(" {} ", strip_control_chars(name)));
            let lines = self.statuses.get(name).cloned().unwrap_or_else(|| self.row(name));
            let lines = anstream::adapter::strip_str(&lines).to_string();
            frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: false }).block(block), middle);
        } else {
            let (shown, selected) = self.shown();
            let mut state = TableState::default().with_selected((!shown.rows.is_empty()).then_some(selected));
            frame.render_stateful_widget(draw::table(&shown, usize::MAX, middle.width), middle, &mut state);
        }
        let cursor = if self.is_typing { "_" } else { "" };
        let filter = if self.filter.is_empty() && !self.is_typing {
            String::new()
        } else {
            format!("filter: {}{cursor}", self.filter)
        };
        frame.render_widget(
            Paragraph::new(vec![Line::from(strip_control_chars(&filter)), Line::from(KEYS).dim()]),
            foot,
        );
    }
}

pub(super) async fn run(
    mut terminal: DefaultTerminal,
    console: &Console,
    mut events: mpsc::Receiver<Event>,
) -> std::io::Result<Exit> {
    let mut screen = FleetScreen::default();
    let (sender, mut fleets) = mpsc::channel(1);
    // No key waits for a worker or a queue.
    let reading = async {
        while sender.send(fleet::read(console).await).await.is_ok() {
            sleep(TOP_REFRESH_INTERVAL).await;
        }
    };
    let mut reading = Box::pin(async { tokio::join!(console.watch(), reading) });
    loop {
        terminal.draw(|frame| screen.draw(frame))?;
        tokio::select! {
            _ = &mut reading => {}
            Some(fleet) = fleets.recv() => (screen.workers, screen.statuses) = fleet,
            event = events.recv() => match event {
                None => return Ok(Exit::Success),
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => if screen.on_key(key) {
                    return Ok(Exit::Success);
                },
                // The next turn draws for another size.
                Some(_) => {}
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::console::rows::cell;

    fn press(screen: &mut FleetScreen, codes: &[KeyCode]) -> bool {
        codes.iter().any(|code| screen.on_key(KeyEvent::from(*code)))
    }

    fn drawn(screen: &FleetScreen) -> String {
        let mut terminal = Terminal::new(TestBackend::new(60, 10)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn workers_are_narrowed_by_a_text_and_one_key_says_why() {
        let row = |name: &str, why: &str| vec![cell(name), cell("running"), cell(why)];
        let rows =
            [row("build-1", "claiming"), row("build-2", "not claiming: paused"), row("render-1\u{1b}", "claiming")];
        let mut screen =
            FleetScreen { workers: Table::new("workers", &["worker", "state", "why"], rows), ..FleetScreen::default() };
        assert!(drawn(&screen).contains("render-1 "), "{}", drawn(&screen));
        let not_claiming = "\u{1b}[1mRUNNING\u{1b}[0m  not claiming: paused".to_owned();
        screen.statuses.insert("build-2".to_owned(), not_claiming);
        press(&mut screen, &[KeyCode::Char('j'), KeyCode::Enter]);
        assert!(drawn(&screen).contains("RUNNING  not claiming: paused"), "{}", drawn(&screen));
        press(&mut screen, &[KeyCode::Esc, KeyCode::Char('j'), KeyCode::Char('j')]);
        press(
            &mut screen,
            &[KeyCode::Char('/'), KeyCode::Char('q'), KeyCode::Backspace, KeyCode::Char('D'), KeyCode::Char('-')],
        );
        assert!(drawn(&screen).contains("filter: D-_") && !drawn(&screen).contains("render-1"), "{}", drawn(&screen));
        press(&mut screen, &[KeyCode::Enter, KeyCode::Char('k'), KeyCode::Enter]);
        assert!(drawn(&screen).contains(" build-1 "), "the last row was selected: {}", drawn(&screen));
        assert!(drawn(&screen).contains("why: claiming"), "{}", drawn(&screen));
        press(&mut screen, &[KeyCode::Esc, KeyCode::Esc]);
        assert!(drawn(&screen).contains("render-1 "), "the filter is gone");
        assert!(press(&mut screen, &[KeyCode::Char('q')]));
    }
}
