"use strict";
// From strokes to what a model of MNIST gets: the drawing is scaled so that its ink fills 20 of 28 pixels, then moved so
// that the ink's centre of mass is the picture's centre. Strokes are drawn anew at that size, eight times as fine, and
// averaged: so lines are as wide and as soft as those of the data set, however large somebody draws.
// Source: LeCun, Cortes, Burges, "The MNIST database of handwritten digits", on how its images were made.

const SIDE = 28, BOX = 20, FINE = 8;
const BRUSH = 2.6;            // pixels of 28: ink of a stroke in the data set
const SMALLEST = 0.12;        // of the pad's side: smaller drawings, a dot, are not blown up any further

// Points of strokes are in [0, 1] of the pad's side. A curve goes through the middles of its segments.
function traceStrokes(context, strokes, place) {
  context.lineCap = context.lineJoin = "round";
  for (const stroke of strokes) {
    const points = stroke.map(place);
    context.beginPath();
    context.moveTo(points[0][0], points[0][1]);
    for (let i = 1; i < points.length - 1; i++) {
      const [x, y] = points[i], [nextX, nextY] = points[i + 1];
      context.quadraticCurveTo(x, y, (x + nextX) / 2, (y + nextY) / 2);
    }
    const [lastX, lastY] = points[points.length - 1];
    context.lineTo(lastX, lastY);
    context.stroke();
  }
}

function finePicture(strokes, place) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = SIDE * FINE;
  const context = canvas.getContext("2d", {willReadFrequently: true});
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.strokeStyle = "#fff";
  context.lineWidth = BRUSH * FINE;
  traceStrokes(context, strokes, place);
  const {data} = context.getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((_, i) => i % 4 === 0);
}

// Returns 784 numbers in [0, 1], row by row, or null where nothing is drawn.
function renderDigit(strokes) {
  const points = strokes.flat();
  if (!points.length) return null;
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const left = Math.min(...xs), right = Math.max(...xs), top = Math.min(...ys), bottom = Math.max(...ys);
  const scale = (BOX - BRUSH) / Math.max(right - left, bottom - top, SMALLEST);
  const middle = [(left + right) / 2, (top + bottom) / 2];
  const at = (dx, dy) => ([x, y]) => [
    (SIDE / 2 + (x - middle[0]) * scale + dx) * FINE, (SIDE / 2 + (y - middle[1]) * scale + dy) * FINE,
  ];
  const width = SIDE * FINE;
  let mass = 0, sumX = 0, sumY = 0;
  finePicture(strokes, at(0, 0)).forEach((ink, i) => {
    mass += ink;
    sumX += ink * (i % width + 0.5);
    sumY += ink * (Math.floor(i / width) + 0.5);
  });
  const fine = finePicture(strokes, at(SIDE / 2 - sumX / mass / FINE, SIDE / 2 - sumY / mass / FINE));
  const pixels = new Array(SIDE * SIDE).fill(0);
  fine.forEach((ink, i) => {
    pixels[Math.floor(i / width / FINE) * SIDE + Math.floor(i % width / FINE)] += ink;
  });
  return pixels.map((sum) => Math.round(sum / (FINE * FINE)) / 255);
}

// Digits to be clicked, as strokes on a square of 100; a repeated point makes a corner.
const DIGITS = [
  ["58,10 42,12 30,28 26,50 30,74 44,89 56,89 70,74 75,50 71,26 58,10 48,11"],
  ["52,8 51,36 49,64 48,92"],
  ["26,30 32,14 50,8 68,14 72,30 64,48 44,68 24,88 24,88 50,88 78,88"],
  ["28,16 46,8 66,14 70,30 60,43 44,48 44,48 64,52 74,66 68,84 48,92 26,84"],
  ["34,10 29,32 25,52 25,52 48,54 76,50", "64,10 62,40 60,66 58,92"],
  ["72,10 50,11 34,12 34,12 32,28 30,44 30,44 48,40 66,46 74,62 68,82 50,92 28,86"],
  ["62,8 46,22 34,44 28,66 34,86 50,92 66,84 70,68 60,56 44,58 32,70"],
  ["24,14 50,13 76,12 76,12 64,36 54,62 46,92"],
  ["66,20 54,9 38,12 32,26 42,42 60,56 70,72 62,88 46,91 32,80 34,66 50,50 66,36 69,24 64,16"],
  ["68,26 58,11 42,12 31,26 36,42 52,46 66,36 69,24 69,24 67,44 63,68 58,92"],
].map((strokes) => strokes.map((stroke) => stroke.split(" ").map((point) => point.split(",").map((x) => x / 100))));
