//! Draws `journeyman top`.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize as _};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Table, TableState};

use super::screen::{ActiveView, LogView, TopScreen, display_name};
use crate::cli::control::status_text::{
    ago, host_text, is_lease_short, lease_left, note_text, outcomes_text, short_name,
};
use crate::cli::table::{format_seconds, strip_control_chars};
use crate::control::WorkerStatusReply;
use crate::worker::status::{ClaimStatus, LifecycleState, SourceStatus, WorkerStatus};
use journeyman_domain::units::format_bytes;

const BAR_CELLS: u8 = 10;
/// From this width on, every column fits.
const WIDE: u16 = 100;
const SOURCES_MAX: usize = 8;
const HINTS_MAX: usize = 2;

const KEYS: &str = "q quit   p pause or resume   d drain   l log   j/k select   b release   c cancel";
pub(super) fn draw(frame: &mut Frame<'_>, screen: &TopScreen) {
    let Some(status) = &screen.status else { return };
    match &screen.active_view {
        ActiveView::Log(log) => draw_log(frame, log),
        ActiveView::Worker => draw_worker(frame, status, screen),
        ActiveView::Question(question) => {
            draw_worker(frame, status, screen);
            popup(frame, &format!(" {}\n\n y yes   any other key no", question.text));
        }
    }
}

fn draw_worker(frame: &mut Frame<'_>, status: &WorkerStatusReply, screen: &TopScreen) {
    let view = &status.snapshot;
    let sources = view.sources.len().min(SOURCES_MAX);
    let hints = view.hints.len().min(HINTS_MAX);
    let height = |lines: usize| Constraint::Length(u16::try_from(lines).unwrap_or(u16::MAX));
    let [head, tasks, places, foot] =
        Layout::vertical([height(3), Constraint::Min(4), height(sources + 2), height(3 + hints)]).areas(frame.area());
    frame.render_widget(Paragraph::new(heading(status)), head);
    let mut selected = TableState::default().with_selected(screen.selected());
    frame.render_stateful_widget(task_table(view, tasks.width), tasks, &mut selected);
    frame.render_widget(source_table(&view.sources), places);
    frame.render_widget(Paragraph::new(footer(view, screen)), foot);
}

fn heading(status: &WorkerStatusReply) -> Text<'static> {
    let view = &status.snapshot;
    let up = format_seconds(view.uptime_seconds);
    let title = format!("journeyman {}  {}  {}  up {up}  pid {}", status.version, status.id, status.group, status.pid);
    let color = match view.state {
        LifecycleState::Running if view.blocked_message.is_none() => Color::Green,
        LifecycleState::Running | LifecycleState::Paused | LifecycleState::Exiting | LifecycleState::Draining => {
            Color::Yellow
        }
        LifecycleState::Releasing | LifecycleState::Exited => Color::Red,
    };
    let mut state = vec![
        Span::styled(view.state.as_str().to_uppercase(), Style::new().fg(color).bold()),
        format!("  {}", view.occupancy()).into(),
    ];
    if let Some(why) = &view.blocked_message {
        state.push(format!("  not claiming: {}", strip_control_chars(why)).into());
    }
    state.extend(view.note.as_ref().map(|note| format!("  {}", note_text(note)).into()));
    Text::from(vec![Line::from(title).bold(), Line::from(state), Line::from(host_text(view.host)).dim()])
}

fn task_table(view: &WorkerStatus, width: u16) -> Table<'static> {
    let mut columns = vec![
        ("TASK", Constraint::Length(24)),
        ("NAME", Constraint::Fill(1)),
        ("LEASE LEFT", Constraint::Length(18)),
        ("STATE", Constraint::Fill(1)),
    ];
    if width >= WIDE {
        columns.extend([
            ("SOURCE", Constraint::Length(10)),
            ("FOR", Constraint::Length(6)),
            ("LOG", Constraint::Length(9)),
        ]);
    }
    let count = columns.len();
    let rows = view.claims.iter().map(|task| task_row(task, count));
    let head = Row::new(columns.iter().map(|(name, _)| *name)).dim();
    let title = if view.claims.is_empty() { " no claims " } else { " claims, shortest lease first " };
    Table::new(rows, columns.into_iter().map(|(_, width)| width))
        .header(head)
        .block(Block::bordered().title(title))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
}

fn task_row(task: &ClaimStatus, columns: usize) -> Row<'static> {
    let state = match &task.progress {
        Some(progress) => format!("{} · {}", task.state, strip_control_chars(progress)),
        None => task.state.clone(),
    };
    let cells = [
        Cell::from(display_name(task)),
        Cell::from(short_name(task)),
        lease(task),
        Cell::from(state),
        Cell::from(task.source.clone()),
        Cell::from(format_seconds(task.held_seconds)),
        Cell::from(format_bytes(task.log_bytes)),
    ];
    Row::new(cells.into_iter().take(columns))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and the cells of a bar")]
fn lease(claim: &ClaimStatus) -> Cell<'static> {
    let Some(left) = claim.lease_left_seconds else { return Cell::from("-") };
    let whole = claim.lease_seconds.filter(|whole| *whole > 0.0).unwrap_or(f64::INFINITY);
    let full = ((left / whole).clamp(0.0, 1.0) * f64::from(BAR_CELLS)).round() as usize;
    let bar = "█".repeat(full) + &"·".repeat(usize::from(BAR_CELLS) - full);
    let style = if is_lease_short(claim) { Style::new().fg(Color::Red) } else { Style::new() };
    Cell::from(Span::styled(format!("{:7} {bar}", lease_left(claim)), style))
}

fn source_table(sources: &[SourceStatus]) -> Table<'static> {
    let rows = sources.iter().take(SOURCES_MAX).map(|source| {
        let mark = if source.failing { "FAILING".red() } else { "ok".green() };
        let detail = source
            .error
            .as_ref()
            .map_or_else(|| source.description.clone(), |error| strip_control_chars(&error.message));
        Row::new([
            Cell::from(source.name.clone()),
            Cell::from(mark),
            Cell::from(ago(source.polled_seconds_ago)),
            Cell::from(detail),
        ])
    });
    let widths = [Constraint::Length(12), Constraint::Length(8), Constraint::Length(12), Constraint::Fill(1)];
    let more = sources.len().saturating_sub(SOURCES_MAX);
    let title = if more > 0 { format!(" sources, and {more} more ") } else { " sources ".to_owned() };
    Table::new(rows, widths).block(Block::bordered().title(title))
}

fn footer(view: &WorkerStatus, screen: &TopScreen) -> Text<'static> {
    let mut lines = vec![Line::from(format!("last hour  {}", outcomes_text(view.last_hour)))];
    lines.extend(
        view.hints
            .iter()
            .take(HINTS_MAX)
            .map(|hint| Line::from(format!("hint  {}", strip_control_chars(hint))).yellow()),
    );
    lines.push(match (&screen.error, &screen.message, &view.next) {
        (Some(error), _, _) => Line::from(format!("showing the last known state: {error}")).red(),
        (None, Some(message), _) => Line::from(message.clone()).bold(),
        (None, None, Some(next)) => Line::from(format!("next  {}", strip_control_chars(next))),
        (None, None, None) => Line::from(""),
    });
    lines.push(Line::from(KEYS).dim());
    Text::from(lines)
}

fn draw_log(frame: &mut Frame<'_>, log: &LogView) {
    let [body, foot] = Layout::vertical([Constraint::Min(3), Constraint::Length(1)]).areas(frame.area());
    let rows = usize::from(body.height.saturating_sub(2));
    let end = log.lines.len() - log.scroll_offset.min(log.lines.len());
    let lines: Vec<Line<'_>> =
        log.lines.range(end.saturating_sub(rows)..end).map(|line| Line::from(line.as_str())).collect();
    let title = format!(" log of {} ", log.task);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(title)), body);
    frame.render_widget(Paragraph::new("q back   j/k move   G end").dim(), foot);
}

fn popup(frame: &mut Frame<'_>, text: &str) {
    let area = frame.area();
    let wide = text.lines().map(|line| line.chars().count()).max().unwrap_or(0) + 3;
    let high = text.lines().count() + 2;
    let fits = |wanted: usize, most: u16| u16::try_from(wanted).unwrap_or(most).min(most);
    let (width, height) = (fits(wide, area.width), fits(high, area.height));
    let place = Rect { x: (area.width - width) / 2, y: (area.height - height) / 2, width, height };
    frame.render_widget(Clear, place);
    frame.render_widget(Paragraph::new(text).block(Block::bordered().title(" ? ")), place);
}
