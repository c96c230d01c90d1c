//! The scenes of `journeyman dev --rabbitmq`: who is asked, what that shows, and how it looks while it goes on.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::super::exit::{Exit, ExitResult, Failure};
use super::super::output;
use super::groups::Stage;
use super::live_display::{Color, LiveDisplay};
use crate::client::{RpcClient, RpcError, RpcReply};
use crate::config::Environment;
use crate::controller::ControllerHandle;
use crate::controller::status::{self, Role};
use crate::limits::{DEMO_REDRAW_INTERVAL, DEMO_TASKS_TIMEOUT};

/// Every key that is asked under.
pub(super) const KEYS: [&str; 3] = ["42", "busy", "infra=7 ü"];

/// What is shown one after the other.
#[derive(Debug, Clone)]
struct Scene {
    name: &'static str,
    key: &'static str,
    /// How many calls at once; nobody asks where there is none, and it is waited until every group is gone.
    calls: usize,
    shows: &'static str,
    state: State,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    NotYet,
    Playing { answered: usize },
    Done(Duration),
    Wrong(String),
}

fn scenes() -> Vec<Scene> {
    let scene = |name, key, calls, shows| Scene { name, key, calls, shows, state: State::NotYet };
    vec![
        scene("cold", KEYS[0], 1, "nobody has asked before: a queue, a worker"),
        scene("warm", KEYS[0], 1, "the same worker answers at once"),
        scene("busy", KEYS[1], 6, "six at once: a second worker helps"),
        scene("odd", KEYS[2], 1, "a key may be any text"),
        scene("calm", "", 0, "nobody asks: workers and queues go"),
        scene("again", KEYS[0], 1, "and come again when they are needed"),
    ]
}

/// As many lines as are drawn at most, with those of the groups.
const LINES: usize = 16;

/// A demo that plays.
pub(super) struct Play<'a> {
    stage: &'a Stage,
    scenes: Vec<Scene>,
    canvas: LiveDisplay,
    /// What each scene said when it was last printed, and the groups; of plain lines only.
    said: Vec<String>,
    began: Instant,
}

impl<'a> Play<'a> {
    pub(super) fn new(stage: &'a Stage, environment: &Environment) -> Self {
        let scenes = scenes();
        let said = vec![String::new(); scenes.len() + 1];
        Self { stage, scenes, canvas: LiveDisplay::new(environment, LINES), said, began: Instant::now() }
    }

    /// Plays all of it, and shows it meanwhile.
    ///
    /// # Errors
    ///
    /// What writing says, and a controller that has gone.
    pub(super) async fn show(&mut self, control: &ControllerHandle) -> ExitResult {
        let client = Arc::new(RpcClient::new(self.stage.settings.broker.clone(), "journeyman dev"));
        let playing = async {
            while self.look(control).await?.role != Role::Active {
                sleep(DEMO_REDRAW_INTERVAL).await;
            }
            for at in 0..self.scenes.len() {
                self.play(at, &client, control).await?;
            }
            Ok::<_, Failure>(())
        };
        match timeout(DEMO_TASKS_TIMEOUT, playing).await {
            Ok(played) => played?,
            Err(_) => self.give_up(),
        }
        let all = self.scenes.iter().all(|scene| matches!(scene.state, State::Done(_)));
        Ok(if all { Exit::Success } else { Exit::Failed })
    }

    fn give_up(&mut self) {
        for scene in &mut self.scenes {
            if matches!(scene.state, State::NotYet | State::Playing { .. }) {
                scene.state = State::Wrong(format!("was not over within {} s", DEMO_TASKS_TIMEOUT.as_secs()));
            }
        }
    }

    async fn play(&mut self, at: usize, client: &Arc<RpcClient>, control: &ControllerHandle) -> Result<(), Failure> {
        let (key, calls, began) = (self.scenes[at].key, self.scenes[at].calls, Instant::now());
        let mut asked = JoinSet::new();
        for _ in 0..calls {
            let (client, call) = (Arc::clone(client), self.stage.call(key));
            asked.spawn(async move { client.call(&call).await });
        }
        let mut answered = 0;
        self.scenes[at].state = State::Playing { answered };
        loop {
            while let Some(answer) = asked.try_join_next() {
                let answer = answer.map_err(|error| Failure::from_error(Exit::Internal, &error))?;
                if let Some(wrong) = complaint(&answer) {
                    self.scenes[at].state = State::Wrong(wrong);
                    return self.look(control).await.map(drop);
                }
                answered += 1;
                self.scenes[at].state = State::Playing { answered };
            }
            let seen = self.look(control).await?;
            if answered == calls && (calls > 0 || seen.groups.is_empty()) {
                self.scenes[at].state = State::Done(began.elapsed());
                return self.look(control).await.map(drop);
            }
            tokio::select! {
                // It is shown as soon as it is there, so that the times are those of the calls.
                Some(answer) = asked.join_next() => {
                    let answer = answer.map_err(|error| Failure::from_error(Exit::Internal, &error))?;
                    match complaint(&answer) {
                        None => answered += 1,
                        Some(wrong) => {
                            self.scenes[at].state = State::Wrong(wrong);
                            return self.look(control).await.map(drop);
                        }
                    }
                }
                () = sleep(DEMO_REDRAW_INTERVAL) => {}
            }
        }
    }

    /// Looks at the pool, and shows it.
    async fn look(&mut self, control: &ControllerHandle) -> Result<status::PoolStatus, Failure> {
        let gone = || Failure::new(Exit::Internal, "the pool is no longer controlled");
        let seen = control.status().await.ok_or_else(gone)?;
        match self.canvas.columns() {
            Some(columns) => {
                let lines = table(&self.scenes, &seen, self.began.elapsed(), columns, self.canvas.color());
                self.canvas.draw(&lines)?;
            }
            None => self.changes(&seen)?,
        }
        Ok(seen)
    }

    fn changes(&mut self, seen: &status::PoolStatus) -> io::Result<()> {
        let groups = if seen.groups.is_empty() { "none".to_owned() } else { groups(seen).join("; ") };
        let lines = self.scenes.iter().map(|scene| match scene.state {
            State::NotYet => String::new(),
            State::Playing { .. } | State::Done(_) | State::Wrong(_) => line(scene),
        });
        let lines: Vec<String> = lines.chain([format!("groups: {groups}")]).collect();
        for (line, said) in lines.iter().zip(&mut self.said) {
            if !line.is_empty() && line != said {
                output::line(&format!("{:6.1}s  {line}", self.began.elapsed().as_secs_f64()))?;
                said.clone_from(line);
            }
        }
        Ok(())
    }

    /// Says how it ended.
    ///
    /// # Errors
    ///
    /// What writing says.
    pub(super) fn conclude(&self) -> io::Result<()> {
        output::line(&format!("\n{}", tally(&self.scenes, self.began.elapsed())))?;
        for scene in &self.scenes {
            if let State::Wrong(why) = &scene.state {
                output::line(&format!("  {} {why}", scene.name))?;
            }
        }
        Ok(())
    }
}

/// What is wrong with an answer; `None` where it is good.
fn complaint(answer: &Result<RpcReply, RpcError>) -> Option<String> {
    match answer {
        Ok(answer) if answer.is_ok() => None,
        Ok(answer) => Some(format!("was answered with {}", answer.status.as_deref().unwrap_or("no status"))),
        Err(error) => Some(error.to_string()),
    }
}

fn line(scene: &Scene) -> String {
    let state = match &scene.state {
        State::NotYet => "-".to_owned(),
        State::Playing { .. } if scene.calls == 0 => "waiting".to_owned(),
        State::Playing { answered } if scene.calls > 1 => format!("{answered} of {} answered", scene.calls),
        State::Playing { .. } => "asked".to_owned(),
        State::Done(took) if scene.calls == 0 => format!("gone in {:.1} s", took.as_secs_f64()),
        State::Done(took) if took.as_millis() < 10_000 => format!("answered in {} ms", took.as_millis()),
        State::Done(took) => format!("answered in {} s", took.as_secs()),
        State::Wrong(_) => "WRONG".to_owned(),
    };
    format!("{:6} {:10} {state:20} {}", scene.name, scene.key, scene.shows)
}

/// The groups that are there, each in a few words.
fn groups(seen: &status::PoolStatus) -> Vec<String> {
    let of = |group: &status::GroupStatus| {
        let workers = group.workers;
        let kinds = [
            (workers.starting, "starting"),
            (workers.idle, "idle"),
            (workers.busy, "busy"),
            (workers.stopping, "stopping"),
        ];
        let there: Vec<String> =
            kinds.iter().filter(|(count, _)| *count > 0).map(|(count, kind)| format!("{count} {kind}")).collect();
        let there = if there.is_empty() { "no worker".to_owned() } else { there.join(" ") };
        format!("{} {}, {there}", group.key, group.phase.as_str())
    };
    seen.groups.iter().map(of).collect()
}

fn table(scenes: &[Scene], seen: &status::PoolStatus, elapsed: Duration, columns: usize, color: Color) -> Vec<String> {
    let cut = |text: &str| text.chars().take(columns.saturating_sub(1)).collect::<String>();
    let mut lines =
        vec![String::new(), color.paint("1", &cut("  CALL   KEY        STATE                WHAT IT SHOWS"))];
    for scene in scenes {
        let (mark, code) = match scene.state {
            State::Done(_) => ("✓", "32"),
            State::Wrong(_) => ("✗", "31"),
            State::Playing { .. } => ("●", "36"),
            State::NotYet => ("·", "2"),
        };
        // The mark carries the colour, so that nothing has to be measured around escape codes.
        lines.push(format!(
            "{} {}",
            color.paint(code, mark),
            cut(&line(scene)).chars().take(columns.saturating_sub(3)).collect::<String>()
        ));
    }
    lines.extend([String::new(), color.paint("1", "  GROUP")]);
    let there = groups(seen);
    if there.is_empty() {
        lines.push("  none".to_owned());
    }
    lines.extend(there.iter().take(KEYS.len()).map(|group| cut(&format!("  {group}"))));
    lines.extend([String::new(), color.paint("1", &cut(&tally(scenes, elapsed)))]);
    lines
}

/// How far it has got, in one line.
fn tally(scenes: &[Scene], elapsed: Duration) -> String {
    let calls: usize = scenes.iter().map(|scene| scene.calls).sum();
    let answered: usize = scenes
        .iter()
        .map(|scene| match scene.state {
            State::Done(_) => scene.calls,
            State::Playing { answered } => answered,
            State::NotYet | State::Wrong(_) => 0,
        })
        .sum();
    format!("{answered} of {calls} calls answered, {:.1} s", elapsed.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tally_counts_calls_and_a_scene_says_how_long_its_calls_took() {
        let mut scenes = scenes();
        scenes[0].state = State::Done(Duration::from_millis(340));
        scenes[2].state = State::Playing { answered: 2 };
        scenes[4].state = State::Done(Duration::from_millis(4_200));
        assert_eq!(tally(&scenes, Duration::from_millis(1_500)), "3 of 10 calls answered, 1.5 s");
        assert!(line(&scenes[0]).contains("answered in 340 ms"), "{}", line(&scenes[0]));
        assert!(line(&scenes[2]).contains("2 of 6 answered"), "{}", line(&scenes[2]));
        assert!(line(&scenes[4]).contains("gone in 4.2 s"), "{}", line(&scenes[4]));
    }
}
