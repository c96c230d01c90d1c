//! `journeyman top --fleet`: the workers of all hosts, narrowed by a text, and why each does what it does.

use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::Stylize as _;
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, TableState, Wrap};
use ratatui::{DefaultTerminal, Frame};
use tokio::sync::mpsc;
use tokio::time::interval;

use super::draw;
use crate::cli::exit::Exit;
use crate::console::app::{Console, fleet};
use crate::console::rows::Table;
use crate::console::text::strip_control_chars;
use journeyman_domain::limits::TOP_REFRESH_INTERVAL;

const KEYS: &str = "q quit   / filter   j/k select   enter why   esc back";

#[derive(Debug, Default)]
pub(super) struct FleetScreen {
    pub(super) workers: Table,
    filter: String,
    is_typing: bool,
    selected: usize,
    /// Lines about one worker, and its name.
    pub(super) detail: Option<(String, Vec<String>)>,
}

/// What a key requires outside of the screen.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FleetAction {
    Quit,
    /// Read why this worker does what it does.
    Explain(String),
}

impl FleetScreen {
    /// The workers that have the filter in one of their cells.
    fn shown(&self) -> Table {
        let wanted = self.filter.to_lowercase();
        let has = |row: &Vec<_>| {
            row.iter().any(|cell: &crate::console::rows::Cell| cell.text().to_lowercase().contains(&wanted))
        };
        let mut shown = self.workers.clone();
        shown.rows.retain(has);
        shown
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "every other key does nothing")]
    pub(super) fn on_key(&mut self, key: KeyEvent) -> Option<FleetAction> {
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Some(FleetAction::Quit);
        }
        if self.is_typing {
            match key.code {
                KeyCode::Enter => self.is_typing = false,
                KeyCode::Esc => (self.is_typing, self.filter) = (false, String::new()),
                KeyCode::Backspace => drop(self.filter.pop()),
                KeyCode::Char(char) => self.filter.push(char),
                _ => {}
            }
            return None;
        }
        let rows = self.shown().rows;
        match key.code {
            KeyCode::Char('q') => return Some(FleetAction::Quit),
            KeyCode::Esc if self.detail.is_some() => self.detail = None,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char('j') | KeyCode::Down => self.selected = (self.selected + 1).min(rows.len().saturating_sub(1)),
            KeyCode::Char('k') | KeyCode::Up => self.selected = self.selected.saturating_sub(1),
            KeyCode::Enter => return rows.get(self.selected)?.first().map(|name| FleetAction::Explain(name.text())),
            _ => {}
        }
        None
    }

    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        let [middle, foot] = Layout::vertical([Constraint::Min(4), Constraint::Length(2)]).areas(frame.area());
        if let Some((name, lines)) = &self.detail {
            let block = Block::bordered().title(format!(" {name} "));
            frame.render_widget(Paragraph::new(lines.join("\n")).wrap(Wrap { trim: false }).block(block), middle);
        } else {
            let shown = self.shown();
            let mut state = TableState::default().with_selected((!shown.rows.is_empty()).then_some(self.selected));
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
    let mut ticks = interval(TOP_REFRESH_INTERVAL);
    let mut watching = Box::pin(console.watch());
    loop {
        terminal.draw(|frame| screen.draw(frame))?;
        tokio::select! {
            () = &mut watching => {}
            _ = ticks.tick() => {
                screen.workers = fleet::table(console).await;
                if let Some((name, lines)) = &mut screen.detail {
                    *lines = fleet::reasons(console, name).await;
                }
            }
            event = events.recv() => match event {
                None => return Ok(Exit::Success),
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => match screen.on_key(key) {
                    None => {}
                    Some(FleetAction::Quit) => return Ok(Exit::Success),
                    Some(FleetAction::Explain(name)) => screen.detail = Some((name.clone(), fleet::reasons(console, &name).await)),
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

    fn press(screen: &mut FleetScreen, codes: &[KeyCode]) -> Option<FleetAction> {
        codes.iter().map(|code| screen.on_key(KeyEvent::from(*code))).last().flatten()
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
        assert_eq!(
            press(&mut screen, &[KeyCode::Char('j'), KeyCode::Enter]),
            Some(FleetAction::Explain("build-2".to_owned()))
        );
        press(
            &mut screen,
            &[KeyCode::Char('/'), KeyCode::Char('q'), KeyCode::Backspace, KeyCode::Char('R'), KeyCode::Char('e')],
        );
        assert!(drawn(&screen).contains("filter: Re_") && !drawn(&screen).contains("build-1"), "{}", drawn(&screen));
        press(&mut screen, &[KeyCode::Enter, KeyCode::Char('k')]);
        screen.detail = Some(("render-1".to_owned(), vec!["no task is pending".to_owned()]));
        assert!(drawn(&screen).contains("no task is pending"), "{}", drawn(&screen));
        press(&mut screen, &[KeyCode::Esc, KeyCode::Esc]);
        assert!(drawn(&screen).contains("build-1"), "the filter is gone");
        assert_eq!(press(&mut screen, &[KeyCode::Char('q')]), Some(FleetAction::Quit));
    }
}
