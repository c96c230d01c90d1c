//! Draws `journeyman top`.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize as _};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Clear, Paragraph, Row, Table, TableState, Wrap};

use super::screen::TopScreen;
use crate::console::rows::{self, Cell, Level, Report, Section, Value};
use crate::console::text::strip_control_chars;
use crate::console::worker;

const BAR_CELLS: u8 = 10;
/// A column is shown if it has this much, or all that it needs.
const COLUMN_CELLS_MIN: usize = 12;
const ESSENTIAL_COLUMNS: usize = 4;
const SOURCES_MAX: usize = 8;
const HINTS_MAX: usize = 2;
/// At the top: containment, clock and others have room in `journeyman status`.
const FACTS_MAX: usize = 2;

const KEYS: &str = "q quit   p pause or resume   d drain   j/k select   b release   c cancel";

pub(super) fn draw(frame: &mut Frame<'_>, screen: &TopScreen) {
    let Some(status) = &screen.status else { return };
    let report = worker::report(status, &[]);
    draw_worker(frame, &report, screen);
    if let Some(question) = &screen.question {
        popup(frame, &format!(" {}\n\n y yes   any other key no", question.text));
    }
}

fn draw_worker(frame: &mut Frame<'_>, report: &Report, screen: &TopScreen) {
    let [section] = report.sections.as_slice() else { return };
    let [claims, sources, .., last_hour] = section.tables.as_slice() else { return };
    let hints = section.alerts.len().min(HINTS_MAX);
    let height = |lines: usize| Constraint::Length(u16::try_from(lines).unwrap_or(u16::MAX));
    let source_lines = sources.rows.len().min(SOURCES_MAX) + 3;
    let [head, middle, low, foot] =
        Layout::vertical([height(3), Constraint::Min(4), height(source_lines), height(3 + hints)]).areas(frame.area());
    frame.render_widget(Paragraph::new(heading(report, section)), head);
    if claims.rows.is_empty() {
        let block = Block::bordered().title(format!(" {} ", claims.title));
        frame.render_widget(Paragraph::new(claims.empty.clone()).wrap(Wrap { trim: true }).block(block), middle);
    } else {
        let mut selected = TableState::default().with_selected(screen.selected());
        frame.render_stateful_widget(table(claims, usize::MAX, middle.width), middle, &mut selected);
    }
    frame.render_widget(table(sources, SOURCES_MAX, low.width), low);
    frame.render_widget(Paragraph::new(footer(section, last_hour, screen)), foot);
}

fn heading(Report { version, name, pid, .. }: &Report, section: &Section) -> Text<'static> {
    let title = format!("journeyman {version}  {}  pid {pid}", clean(name));
    let headline = &section.headline;
    let color = if headline.level == Level::Plain { Color::Green } else { color(headline.level) };
    let state = Span::styled(headline.state.to_uppercase(), Style::new().fg(color).bold());
    let facts = section.facts.iter().take(FACTS_MAX).map(|row| format!("{} {}", row.label, clean(&row.cell)));
    let facts = facts.collect::<Vec<_>>().join("   ");
    let why = format!("  {}", clean(&headline.cell));
    Text::from(vec![Line::from(title).bold(), Line::from(vec![state, why.into()]), Line::from(facts).dim()])
}

fn clean(cell: &Cell) -> String {
    strip_control_chars(&cell.text())
}

const fn color(level: Level) -> Color {
    match level {
        Level::Plain => Color::Reset,
        Level::Good => Color::Green,
        Level::Warn => Color::Yellow,
        Level::Bad => Color::Red,
    }
}

pub(super) fn table(table: &rows::Table, rows_max: usize, width: u16) -> Table<'static> {
    let lines: Vec<Vec<Line<'static>>> =
        table.rows.iter().take(rows_max).map(|row| row.iter().map(line).collect()).collect();
    let widths = widths(table, &lines, usize::from(width).saturating_sub(2));
    let shown = widths.len();
    let head = Row::new(table.columns.iter().take(shown).map(|column| column.to_uppercase())).dim();
    let more = table.rows.len().saturating_sub(rows_max);
    let title = if more > 0 { format!(" {}, and {more} more ", table.title) } else { format!(" {} ", table.title) };
    let rows = lines.into_iter().map(|row| Row::new(row.into_iter().take(shown)));
    let widths = widths.into_iter().map(|cells| Constraint::Length(u16::try_from(cells).unwrap_or(u16::MAX)));
    Table::new(rows, widths)
        .header(head)
        .block(Block::bordered().title(title))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
}

/// The widths of the columns that fit. The essential ones have what they need before there is another one.
fn widths(table: &rows::Table, lines: &[Vec<Line<'_>>], width: usize) -> Vec<usize> {
    let widest = |column: usize| lines.iter().filter_map(|row| row.get(column)).map(Line::width).max().unwrap_or(0);
    let needed = table.columns.iter().enumerate().map(|(index, name)| widest(index).max(name.chars().count()));
    let mut room = width;
    let mut widths: Vec<(usize, usize)> = Vec::new();
    for (index, needed) in needed.enumerate() {
        if index >= ESSENTIAL_COLUMNS {
            grow(&mut widths, &mut room);
        }
        let least = needed.min(COLUMN_CELLS_MIN);
        let Some(rest) = room.checked_sub(least + usize::from(index > 0)) else { break };
        room = rest;
        widths.push((least, needed));
    }
    grow(&mut widths, &mut room);
    widths.into_iter().map(|(width, _)| width).collect()
}

/// Gives each column what it needs as far as there is room, the first ones before the others.
fn grow(widths: &mut [(usize, usize)], room: &mut usize) {
    for (width, needed) in widths {
        let more = (*needed - *width).min(*room);
        *room -= more;
        *width += more;
    }
}

fn line(cell: &Cell) -> Line<'static> {
    let mut spans = Vec::new();
    for part in &cell.parts {
        if !spans.is_empty() {
            spans.push(Span::raw(if part.is_note { ", " } else { " · " }));
        }
        let text = strip_control_chars(&part.value.text());
        let style = Style::new().fg(color(part.level));
        let text = if let Value::Left { seconds, of } = &part.value {
            format!("{text:7} {}", bar(*seconds, *of))
        } else {
            text
        };
        spans.push(Span::styled(text, style));
    }
    Line::from(spans)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and the cells of a bar")]
fn bar(left: f64, of: Option<f64>) -> String {
    let whole = of.filter(|whole| *whole > 0.0).unwrap_or(f64::INFINITY);
    let full = ((left / whole).clamp(0.0, 1.0) * f64::from(BAR_CELLS)).round() as usize;
    "█".repeat(full) + &"·".repeat(usize::from(BAR_CELLS) - full)
}

fn footer(section: &Section, last_hour: &rows::Table, screen: &TopScreen) -> Text<'static> {
    let counts = last_hour.rows.iter().flatten().zip(&last_hour.columns);
    let counts = counts.map(|(count, name)| format!("{name} {}", count.text())).collect::<Vec<_>>().join("   ");
    let mut lines = vec![Line::from(format!("{}  {counts}", last_hour.title))];
    let hints = section.alerts.iter().take(HINTS_MAX);
    lines.extend(hints.map(|(level, hint)| Line::from(strip_control_chars(hint)).fg(color(*level))));
    let next = section.facts.iter().find(|row| row.label == "next");
    lines.push(match (&screen.error, &screen.message, next) {
        (Some(error), _, _) => Line::from(format!("showing the last known state: {error}")).red(),
        (None, Some(message), _) => Line::from(message.clone()).bold(),
        (None, None, Some(next)) => Line::from(format!("next  {}", clean(&next.cell))),
        (None, None, None) => Line::from(""),
    });
    lines.push(Line::from(KEYS).dim());
    Text::from(lines)
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
