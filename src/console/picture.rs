//! Pictures as inline SVG. Widths are in percent, so that text keeps its size on a phone; colours are classes of the page's style.

use maud::{Markup, html};

/// The smallest bar that can be seen, in percent.
const BAR_WIDTH_MIN: f64 = 0.25;
const LANE_HEIGHT: u32 = 16;
const CHART_HEIGHT: f64 = 60.0;
const SLOT_SIZE: usize = 12;
/// Further slots are told as a number.
pub(crate) const SLOTS_MAX: usize = 48;

/// A part of a lane, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bar {
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) class: &'static str,
    pub(crate) title: String,
    pub(crate) href: Option<String>,
}

/// A row of a timeline.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Lane {
    pub(crate) label: String,
    pub(crate) bars: Vec<Bar>,
    pub(crate) ticks: Vec<f64>,
}

/// Lanes over one axis. `ends` are the words at its ends.
pub(crate) fn timeline(lanes: &[Lane], from: f64, to: f64, ends: [&str; 2]) -> Markup {
    let whole = (to - from).max(f64::MIN_POSITIVE);
    let at = |time: f64| ((time - from) / whole * 100.0).clamp(0.0, 100.0);
    let bar = |bar: &Bar| {
        let (start, end) = (at(bar.from), at(bar.to));
        let width = (end - start).max(BAR_WIDTH_MIN);
        html! {
            rect class=(bar.class) x=(percent(start.min(100.0 - width))) width=(percent(width)) height=(LANE_HEIGHT) { title { (bar.title) } }
        }
    };
    html! {
        div.timeline {
            @for lane in lanes {
                div.lane {
                    span { (lane.label) }
                    svg role="img" aria-label={ (lane.label) ": " (described(lane)) } width="100%" height=(LANE_HEIGHT) {
                        @for one in &lane.bars {
                            @match &one.href { Some(href) => a href=(href) { (bar(one)) }, None => (bar(one)) }
                        }
                        @for tick in &lane.ticks { rect.tick x=(percent(at(*tick))) width="2" height=(LANE_HEIGHT) { title { "reclaimed" } } }
                    }
                }
            }
            div.axis { span { (ends[0]) } span { (ends[1]) } }
        }
    }
}

fn described(lane: &Lane) -> String {
    lane.bars.iter().map(|bar| bar.title.as_str()).collect::<Vec<_>>().join(", ")
}

fn percent(part: f64) -> String {
    format!("{part:.2}%")
}

/// What the colours of a picture mean.
pub(crate) fn legend(classes: &[(&'static str, &str)]) -> Markup {
    html! {
        p.legend { @for (class, name) in classes { span { svg width="10" height="10" { rect class=(class) width="10" height="10" {} } " " (name) } } }
    }
}

/// Lines over the same time, each with its class and name; the latest value last.
pub(crate) fn lines(series: &[(&'static str, &str, Vec<u32>)], ends: [&str; 2]) -> Markup {
    let most = series.iter().flat_map(|(_, _, values)| values).copied().max().unwrap_or(0).max(1);
    let last = series.iter().map(|(_, _, values)| values.len()).max().unwrap_or(0).saturating_sub(1).max(1);
    let points = |values: &[u32]| {
        let height = |value: u32| CHART_HEIGHT - 1.0 - f64::from(value) / f64::from(most) * (CHART_HEIGHT - 2.0);
        let point = |(index, value): (usize, &u32)| format!("{index},{:.1}", height(*value));
        values.iter().enumerate().map(point).collect::<Vec<_>>().join(" ")
    };
    let total = |values: &[u32]| values.iter().map(|value| u64::from(*value)).sum::<u64>();
    let names = series.iter().map(|(_, name, values)| format!("{name} {}", total(values))).collect::<Vec<_>>();
    html! {
        div.chart {
            svg role="img" aria-label=(names.join(", ")) width="100%" height=(CHART_HEIGHT) preserveAspectRatio="none"
                viewBox={ "0 0 " (last) " " (CHART_HEIGHT) } {
                @for (class, _, values) in series { polyline class={ "line " (class) } points=(points(values)) {} }
            }
            div.axis { span { (ends[0]) ", at most " (most) } span { (ends[1]) } }
        }
    }
}

/// Columns with the name and the count of each below it.
pub(crate) fn histogram(name: &str, columns: &[(String, u32)]) -> Markup {
    let most = columns.iter().map(|(_, count)| *count).max().unwrap_or(0).max(1);
    let height = |count: u32| f64::from(count) / f64::from(most) * CHART_HEIGHT;
    html! {
        figure.histogram {
            figcaption { (name) }
            table {
                tr aria-hidden="true" { @for (_, count) in columns {
                    td { svg width="100%" height=(CHART_HEIGHT) {
                        rect.run width="100%" y=(format!("{:.1}", CHART_HEIGHT - height(*count))) height=(format!("{:.1}", height(*count))) {}
                    } }
                } }
                tr { @for (_, count) in columns { td { (count) } } }
                tr { @for (label, _) in columns { th { (label) } } }
            }
        }
    }
}

/// The slots of a worker: the class of each, and how many there are.
pub(crate) fn slots(slots: &[&'static str], capacity: usize) -> Markup {
    let shown = slots.len().min(SLOTS_MAX);
    html! {
        svg.slots role="img" aria-label={ (capacity) " slots" } width=(shown * SLOT_SIZE) height=(SLOT_SIZE) {
            @for (index, class) in slots[..shown].iter().enumerate() {
                rect class=(class) x=(index * SLOT_SIZE) width=(SLOT_SIZE - 2) height=(SLOT_SIZE - 2) {}
            }
        }
        @if capacity > shown { " and " (capacity - shown) " more" }
    }
}

/// Puts bars that overlap in time into lanes of their own, the fewest that are needed.
pub(crate) fn packed(mut groups: Vec<Vec<Bar>>) -> Vec<Vec<Bar>> {
    let (start, end) =
        (|bars: &[Bar]| bars.first().map_or(0.0, |bar| bar.from), |bars: &[Bar]| bars.last().map_or(0.0, |bar| bar.to));
    groups.sort_by(|one, other| start(one).total_cmp(&start(other)));
    let mut lanes: Vec<Vec<Bar>> = Vec::new();
    for group in groups {
        match lanes.iter_mut().find(|lane| end(lane) <= start(&group)) {
            Some(lane) => lane.extend(group),
            None => lanes.push(group),
        }
    }
    lanes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(from: f64, to: f64) -> Bar {
        Bar { from, to, class: "run", title: "run <1>".to_owned(), href: None }
    }

    #[test]
    fn a_bar_stands_where_its_time_is_and_can_be_seen() {
        let lane = Lane { label: "run 0".to_owned(), bars: vec![bar(0.0, 50.0), bar(100.0, 100.0)], ticks: vec![25.0] };
        let drawn = timeline(&[lane], 0.0, 100.0, ["start", "now"]).into_string();
        assert!(
            drawn.contains(r#"x="0.00%" width="50.00%""#) && drawn.contains(r#"x="99.75%" width="0.25%""#),
            "{drawn}"
        );
        assert!(drawn.contains(r#"class="tick" x="25.00%""#) && drawn.contains("run &lt;1&gt;"), "{drawn}");
        // Nothing has happened yet.
        timeline(&[Lane::default()], 5.0, 5.0, ["", ""]);
    }

    #[test]
    fn lines_have_the_height_of_the_largest_value() {
        let drawn = lines(&[("good", "completed", vec![0, 4, 2])], ["an hour ago", "now"]).into_string();
        assert!(drawn.contains(r#"points="0,59.0 1,1.0 2,30.0""#) && drawn.contains("completed 6"), "{drawn}");
        lines(&[], ["", ""]);
    }

    #[test]
    fn claims_that_overlap_have_lanes_of_their_own() {
        let lanes = packed(vec![vec![bar(5.0, 9.0)], vec![bar(0.0, 2.0), bar(2.0, 6.0)], vec![bar(6.0, 7.0)]]);
        let starts: Vec<Vec<f64>> = lanes.iter().map(|lane| lane.iter().map(|bar| bar.from).collect()).collect();
        assert_eq!(starts, [vec![0.0, 2.0, 6.0], vec![5.0]]);
    }

    #[test]
    fn columns_and_slots_have_their_numbers() {
        let drawn = histogram("run time", &[("1s".to_owned(), 3), ("10s".to_owned(), 0)]).into_string();
        assert!(drawn.contains(r#"y="0.0" height="60.0""#) && drawn.contains("<td>3</td>"), "{drawn}");
        let drawn = slots(&["run"; 50], 50).into_string();
        assert!(drawn.contains("and 2 more") && drawn.matches("<rect").count() == 48, "{drawn}");
    }
}
