//! Every history of one lane and two nodes that share its store, within bounds: leases that end, nodes that stop in the middle of an
//! attempt and go on later, or die, and answers of the receiver that are lost.
//!
//! Who takes the lane is decided by the project's own [`plan`]. What the model adds is the store, time and the receiver, and wrong
//! nodes that must be caught.

use std::collections::BTreeSet;

use journeyman_domain::lane::partitions::{Owned, Partition, plan};
use stateright::{Checker, HasDiscoveries, Model, Property};

const NODES: [&str; 2] = ["a", "b"];
const MESSAGES: u8 = 3;

#[derive(Clone, Copy)]
struct World {
    /// How often a node stops and goes on, and how many nodes die.
    stalls: u8,
    crashes: u8,
    /// Answers that are lost.
    losses: u8,
    node: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Ours,
    /// A mutant: it stores that a message was delivered whatever the head is by now.
    Unfenced,
    /// A mutant: it does not look at its clock before it sends.
    Clockless,
}

const GOOD: World = World { stalls: 2, crashes: 1, losses: 1, node: Kind::Ours };
const ORDER: &str = "only the head is repeated, and none is left out";
const LOST: &str = "what is stored as delivered was received";
const REFUSED: &str = "a commit of a former owner is refused";

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    /// The store.
    owner: Option<usize>,
    token: u8,
    head: u8,
    nodes: [Node; 2],
    /// The last message that was received.
    received: u8,
    is_out_of_order: bool,
    has_refused: bool,
    stalls: u8,
    crashes: u8,
    losses: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Node {
    is_dead: bool,
    is_stalled: bool,
    /// Its lease, in the store and by its own clock, which ends first.
    is_live: bool,
    is_leased: bool,
    attempt: Option<Attempt>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Attempt {
    position: u8,
    token: u8,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    /// The head was read.
    Read,
    Sent,
    Answered,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    Renew(usize),
    /// The node's own clock ends its lease.
    End(usize),
    /// The store's clock does.
    Expire(usize),
    Stall(usize),
    GoOn(usize),
    Die(usize),
    Read(usize),
    Send(usize),
    Receive(usize),
    LoseAnswer(usize),
    Commit(usize),
}

impl World {
    fn renew(state: &mut State, me: usize) {
        state.nodes[me].is_live = true;
        let live: BTreeSet<String> =
            (0..2).filter(|node| state.nodes[*node].is_live).map(|node| NODES[node].to_owned()).collect();
        let owner = state.owner.map(|node| NODES[node].to_owned());
        let plan = plan(NODES[me], &live, &[Owned { partition: Partition(0), owner }]);
        if !plan.take.is_empty() {
            state.owner = Some(me);
            state.token += 1;
        }
        state.nodes[me].is_leased = true;
    }

    fn receive(state: &mut State, position: u8) {
        let is_head_or_next = position == state.received || position == state.received + 1;
        state.is_out_of_order |= !is_head_or_next;
        state.received = state.received.max(position);
    }

    fn commit(self, state: &mut State, me: usize) {
        let Some(attempt) = state.nodes[me].attempt.take() else { return };
        let is_ours = state.owner == Some(me) && state.token == attempt.token && state.head == attempt.position;
        if is_ours || self.node == Kind::Unfenced {
            state.head += 1;
        } else {
            state.has_refused = true;
        }
    }
}

impl Model for World {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let World { stalls, crashes, losses, .. } = *self;
        vec![State {
            owner: None,
            token: 0,
            head: 1,
            nodes: [Node::default(); 2],
            received: 0,
            is_out_of_order: false,
            has_refused: false,
            stalls,
            crashes,
            losses,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for (me, node) in state.nodes.iter().enumerate() {
            // A request that was sent is on its way whatever becomes of the node, for less time than the margin of the lease.
            let is_sent = node.attempt.is_some_and(|attempt| attempt.phase == Phase::Sent);
            if is_sent {
                steps.push(Step::Receive(me));
            }
            if node.is_live && (!node.is_leased || node.is_stalled || node.is_dead) && !is_sent {
                steps.push(Step::Expire(me));
            }
            if node.is_dead {
                continue;
            }
            if node.is_stalled {
                steps.push(Step::GoOn(me));
                continue;
            }
            if state.stalls > 0 {
                steps.push(Step::Stall(me));
            }
            if state.crashes > 0 {
                steps.push(Step::Die(me));
            }
            steps.push(Step::Renew(me));
            if node.is_leased {
                steps.push(Step::End(me));
            }
            match node.attempt.map(|attempt| attempt.phase) {
                None if node.is_leased && state.owner == Some(me) && state.head <= MESSAGES => {
                    steps.push(Step::Read(me))
                }
                Some(Phase::Read) if node.is_leased || self.node == Kind::Clockless => steps.push(Step::Send(me)),
                Some(Phase::Answered) => {
                    steps.push(Step::Commit(me));
                    if state.losses > 0 {
                        steps.push(Step::LoseAnswer(me));
                    }
                }
                None | Some(Phase::Read | Phase::Sent) => {}
            }
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        match step {
            Step::Renew(me) => Self::renew(&mut state, me),
            Step::End(me) => {
                state.nodes[me].is_leased = false;
                // It ends what it has not sent.
                if self.node != Kind::Clockless {
                    state.nodes[me].attempt.take_if(|attempt| attempt.phase == Phase::Read);
                }
            }
            Step::Expire(me) => state.nodes[me].is_live = false,
            Step::Stall(me) => {
                state.stalls -= 1;
                state.nodes[me].is_stalled = true;
            }
            Step::GoOn(me) => {
                let node = &mut state.nodes[me];
                node.is_stalled = false;
                // It has slept past its lease, and its clock says so.
                node.is_leased &= node.is_live;
                if !node.is_leased && self.node != Kind::Clockless {
                    node.attempt.take_if(|attempt| attempt.phase == Phase::Read);
                }
            }
            Step::Die(me) => {
                state.crashes -= 1;
                let node = &mut state.nodes[me];
                (node.is_dead, node.is_leased) = (true, false);
                node.attempt.take_if(|attempt| attempt.phase != Phase::Sent);
            }
            Step::Read(me) => {
                let (position, token) = (state.head, state.token);
                state.nodes[me].attempt = Some(Attempt { position, token, phase: Phase::Read });
            }
            Step::Send(me) => state.nodes[me].attempt.as_mut()?.phase = Phase::Sent,
            Step::Receive(me) => {
                let attempt = state.nodes[me].attempt.as_mut()?;
                attempt.phase = Phase::Answered;
                let position = attempt.position;
                if state.nodes[me].is_dead {
                    state.nodes[me].attempt = None;
                }
                Self::receive(&mut state, position);
            }
            Step::LoseAnswer(me) => {
                state.losses -= 1;
                state.nodes[me].attempt = None;
            }
            Step::Commit(me) => self.commit(&mut state, me),
        }
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ORDER, |_, state: &State| !state.is_out_of_order),
            Property::always(LOST, |_, state: &State| state.received + 1 >= state.head),
            Property::sometimes(REFUSED, |_, state: &State| state.has_refused),
            Property::sometimes("all are delivered after a node has died", |world: &World, state: &State| {
                state.head > MESSAGES && state.crashes < world.crashes && state.token > 1
            }),
        ]
    }

    // Renewals could go on for ever.
    fn within_boundary(&self, state: &State) -> bool {
        state.token <= 6
    }
}

fn explored(world: World) -> Vec<&'static str> {
    let checker = world.checker().threads(2).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    println!("a lane of two nodes: {} unique states to depth {}", checker.unique_state_count(), checker.max_depth());
    let mut found: Vec<_> = checker.discoveries().into_iter().map(|(name, path)| (name, path.into_actions())).collect();
    found.sort_unstable_by_key(|(name, _)| *name);
    for (name, steps) in &found {
        println!("{name}: {steps:?}");
    }
    found.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn p3_two_nodes_keep_the_order_of_a_lane_in_every_history() {
    assert_eq!(explored(GOOD), [REFUSED, "all are delivered after a node has died"]);
}

#[test]
fn a_node_that_stores_whatever_the_head_is_is_caught() {
    let found = explored(World { node: Kind::Unfenced, ..GOOD });
    assert!(found.contains(&LOST), "{found:?}");
}

#[test]
fn a_node_that_does_not_look_at_its_clock_before_it_sends_is_caught() {
    let found = explored(World { node: Kind::Clockless, ..GOOD });
    assert!(found.contains(&ORDER), "{found:?}");
}
